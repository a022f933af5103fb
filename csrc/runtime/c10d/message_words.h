// MessageWords: how a sender tells the receiver of a message that its data is ready.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/c10d/abortable_works.h"

namespace fold3d::runtime {

/// One end of a line of words: a byte for each message, in host memory, by the group that has the messages' frames and
/// beside these. Both ends push a word for the same messages, in one order. Nothing depends on words but who makes room
/// for whom: what goes wrong with them ends them silently, and the transport hears of it by its messages.
///
/// A thread sends, or receives, one after the other. Thread-safe.
class MessageWords {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using Flag = std::shared_ptr<const std::atomic<bool>>;

  MessageWords(Group group, bool sends) : group_(std::move(group)), sends_(sends), thread_([this] { loop(); }) {
    pthread_setname_np(thread_.native_handle(), sends ? "words_out" : "words_in");
  }
  ~MessageWords() {
    abort("the line was closed");
    thread_.join();
  }
  MessageWords(const MessageWords&) = delete;
  MessageWords& operator=(const MessageWords&) = delete;

  /// The next word goes to `peer`, a rank of the group, or comes from it. Never blocks. What is returned becomes true
  /// when it has.
  Flag push(int peer) {
    auto passed = std::make_shared<std::atomic<bool>>(false);
    {
      const std::lock_guard lock(mutex_);
      words_.push_back({.peer = peer, .passed = passed});
    }
    changed_.notify_one();
    return passed;
  }

  /// Ends the line. Idempotent.
  void abort(const std::string& reason) noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_one();
    works_.abort(reason);
  }

 private:
  static constexpr int kTag = 1;  // frames have 0

  struct Word {
    int peer = 0;
    std::shared_ptr<std::atomic<bool>> passed;
  };

  void loop() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopped_ || !words_.empty(); });
      if (stopped_) return;
      const Word word = std::move(words_.front());
      words_.pop_front();
      lock.unlock();
      try {
        std::vector<at::Tensor> byte{at::zeros({1}, at::kByte)};
        works_.wait(sends_ ? group_->send(byte, word.peer, kTag) : group_->recv(byte, word.peer, kTag));
      } catch (const std::exception&) {
        return;
      }
      word.passed->store(true);
      lock.lock();
    }
  }

  const Group group_;
  const bool sends_;
  AbortableWorks works_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Word> words_;
  bool stopped_ = false;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace fold3d::runtime
