#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "comm/ring/exchange.h"

namespace fold3d::comm {

/// What TP.sync of a rank moved, when it was waited for, and for how long it travelled while nobody waited.
/// Thread-safe.
class TensorAccount final {
 public:
  /// One exchange as it happened on this rank; times are std::chrono::steady_clock nanoseconds.
  struct Record {
    Exchange::Kind kind = Exchange::Kind::kAllReduce;
    std::int64_t issued_ns = 0;
    std::int64_t start_ns = 0;  ///< what begin() returned; 0: nothing travelled
    std::int64_t end_ns = 0;
    std::size_t bytes = 0;  ///< sent by this rank
  };
  /// Sums since the beginning.
  struct Counters {
    std::int64_t exchanges = 0;
    std::int64_t bytes = 0;        ///< sent by this rank
    std::int64_t transfer_ns = 0;  ///< from start to end, exchanges that overlap counted one after the other
    std::int64_t waited_ns = 0;    ///< somebody waited: what computing did not hide
    std::int64_t hidden_ns = 0;    ///< something was under way and nobody waited
  };
  /// When somebody waited; times as in Record.
  struct Wait {
    std::int64_t start_ns = 0, end_ns = 0;
  };
  /// Somebody waits for as long as it lives.
  class Waiting {
   public:
    explicit Waiting(TensorAccount& account) : account_(account) { account_.begin_wait(); }
    ~Waiting() { account_.end_wait(); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    TensorAccount& account_;
  };

  /// An exchange begins to travel; returns when.
  std::int64_t begin();
  /// An exchange is complete, now; `record.end_ns` is not read. One that did not begin starts where it was issued.
  void end(Record record);

  /// Whether records, of exchanges and of waits, are kept until somebody takes them; at first they are not.
  void keep_records(bool keep);
  /// What was completed since the last call, in the order of completion.
  std::vector<Record> take_records();
  /// Which waits ended since the last call; several at once are one.
  std::vector<Wait> take_waits();
  /// The sums, of what is under way and of who waits until now.
  Counters counters();

 private:
  void begin_wait();
  void end_wait();
  std::int64_t advance();

  std::mutex mutex_;
  bool keep_records_ = false;
  std::vector<Record> records_;
  std::vector<Wait> waits_;
  Counters counters_;
  int under_way_ = 0;                  // exchanges
  int waiting_ = 0;                    // threads
  std::int64_t waiting_since_ns_ = 0;  // where there are any
  std::int64_t counted_ns_ = 0;        // until when counters_ has what passes with time
};

}  // namespace fold3d::comm
