#include "comm/p2p/communicator.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "comm/base/clock.h"
#include "comm/base/errors.h"
#include "comm/p2p/frame.h"
#include "comm/p2p/message_routing.h"
#include "core/ir/deps.h"

namespace fold3d::comm {
namespace {

constexpr int kAbsent = -1;

bool is_recv(QueueId id) { return id == QueueId::kRecvForward || id == QueueId::kRecvBackward; }

/// Whether a message surely fits into its frame.
bool is_small(const Tensors& tensors) {
  std::size_t total = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.buffer && tensor.buffer->host_data() == nullptr) return false;
    total += tensor.desc.bytes();
  }
  return total <= kFrameBytes / 2;
}

Options checked(Options options) {
  const auto reject = [](const std::string& what) { throw std::invalid_argument("communicator: " + what); };
  if (options.shape.pp < 1 || options.shape.segments < 1) reject("pp and segments must be at least 1");
  if (options.stage < 0 || options.stage >= options.shape.pp) {
    reject("stage " + std::to_string(options.stage) + " is not in [0, pp = " + std::to_string(options.shape.pp) + ")");
  }
  if (options.timeout.count() <= 0) reject("the timeout (setting comm_timeout) must be positive");
  if (options.receive_ahead < 0) reject("receive_ahead must not be negative");
  core::check_hosts(options.hosts, options.shape.pp, "communicator");
  return options;
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport, Options options, std::shared_ptr<NicArbiter> arbiter,
                           std::unique_ptr<Allocator> allocator, std::shared_ptr<Landing> landing)
    : options_(checked(std::move(options))),
      name_(options_.name.empty() ? "stage " + std::to_string(options_.stage) : options_.name),
      transport_(std::move(transport)),
      allocator_(std::move(allocator)),
      pool_(*allocator_),
      landing_(std::move(landing)),
      arbiter_(arbiter ? std::move(arbiter) : std::make_shared<NicArbiter>()) {
  for (std::size_t i = 0; i < kNumQueues; ++i) {
    const auto id = static_cast<QueueId>(i);
    lines_[i].frame.resize(kFrameBytes);
    lines_[i].queue = std::make_unique<TransferQueue>(to_string(id), [this, id](std::size_t index) { run(id, index); });
  }
}

Communicator::~Communicator() {
  const bool busy = std::any_of(lines_.begin(), lines_.end(), [](const Line& l) { return !l.queue->idle(); });
  if (busy) fail(Failure::Kind::kAborted, name_ + " closed its communicator in the middle of a step");
  {
    const std::lock_guard lock(fail_mutex_);
  }
  for (Line& each : lines_) each.queue->stop();
  for (Line& each : lines_) each.queue.reset();
  try {
    transport_->end();  // before memory goes that receives which nobody waited for may still write to
  } catch (...) {
    // What the device was told has failed, and so it has ended.
  }
}

void Communicator::check_belongs(const core::Action& action) const {
  const core::Shape& shape = options_.shape;
  const auto reject = [&](const std::string& why) {
    throw std::invalid_argument(name_ + ": " + core::to_string(action) + " cannot be in its program: " + why);
  };
  if (action.chunk < 0 || action.chunk >= shape.num_chunks()) {
    reject("there are " + std::to_string(shape.num_chunks()) + " chunks");
  }
  if (shape.stage_of(action.chunk) != options_.stage) {
    reject("chunk " + std::to_string(action.chunk) + " belongs to stage " +
           std::to_string(shape.stage_of(action.chunk)));
  }
  if (action.micro_batch < 0) reject("a message needs a micro-batch");
  const int other = core::other_end(action).chunk;
  if (other < 0 || other >= shape.num_chunks())
    reject("there is no chunk " + std::to_string(other) + " at its other end");
  if (shape.stage_of(other) == options_.stage) reject("its other end is on the same rank");
}

std::size_t Communicator::key_of(const core::Action& action) const {
  return static_cast<std::size_t>(action.chunk) * static_cast<std::size_t>(micro_batches_) +
         static_cast<std::size_t>(std::max(action.micro_batch, 0));
}

std::size_t Communicator::position_of(QueueId id, const core::Action& action) {
  const bool in_range =
      action.chunk >= 0 && action.chunk < options_.shape.num_chunks() && action.micro_batch < micro_batches_;
  const int position = open_ && in_range ? line(id).positions[key_of(action)] : kAbsent;
  if (position == kAbsent) {
    throw std::logic_error(name_ + ": " + core::to_string(action) + " is not in the program of the step under way");
  }
  return static_cast<std::size_t>(position);
}

/// Fills the lines with the messages of a step.
void Communicator::read(const std::vector<core::Action>& program) {
  int micro_batches = 1;
  for (const core::Action& action : program) {
    if (!is_message(action.kind)) continue;
    check_belongs(action);
    micro_batches = std::max(micro_batches, action.micro_batch + 1);
  }
  micro_batches_ = micro_batches;
  const std::size_t num_keys =
      static_cast<std::size_t>(options_.shape.num_chunks()) * static_cast<std::size_t>(micro_batches);
  for (Line& each : lines_) {
    each.tasks.clear();
    each.positions.assign(num_keys, kAbsent);
    each.issued = 0;
  }
  for (const core::Action& action : program) {
    if (!is_message(action.kind)) continue;
    Line& to = line(queue_of(action.kind));
    int& position = to.positions[key_of(action)];
    if (position != kAbsent) {
      throw std::invalid_argument(name_ + ": " + core::to_string(action) + " occurs twice in its program");
    }
    position = static_cast<int>(to.tasks.size());
    to.tasks.push_back(Task{.action = action, .tensors = {}, .waited = false, .lands = false});
  }
  for (const core::Action& action : program) {
    const bool forward = action.kind == core::Kind::kPrefetchForward;
    if (!forward && action.kind != core::Kind::kPrefetchBackward) continue;
    const core::Kind recv = forward ? core::Kind::kRecvForward : core::Kind::kRecvBackward;
    Line& of = line(queue_of(recv));
    const int position = action.micro_batch < micro_batches ? of.positions[key_of(action)] : kAbsent;
    if (position == kAbsent) continue;  // it was made here
    if (!landing_) throw std::logic_error(name_ + ": " + core::to_string(action) + ", but no message can land");
    of.tasks[static_cast<std::size_t>(position)].lands = true;
  }
  for (Line& each : lines_) {
    each.on_device.clear();
    for (std::size_t k = 0; k < each.tasks.size(); ++k) {
      if (!each.tasks[k].lands) each.on_device.push_back(k);
    }
  }
}

void Communicator::begin(const std::vector<core::Action>& program, bool goes_on) {
  failure_.check();
  if (open_) throw std::logic_error(name_ + ": begin() before finish() of the step before");
  if (goes_on != left_) throw std::logic_error(name_ + ": begin() has to go on with a step that was left, and only so");
  if (left_) end_sends();
  left_ = false;
  read(program);
  transport_->begin();
  allocator_->begin();
  pool_.next_step();
  if (!goes_on) ++step_;
  open_ = true;
  for (Line& each : lines_) each.queue->start(each.tasks.size());
  for (const QueueId id : {QueueId::kRecvForward, QueueId::kRecvBackward}) {
    line(id).queue->raise(limit_after(line(id), 0));
  }
}

/// How many receives may run when the program has passed so many of them: messages that land do so as soon as they
/// come.
std::size_t Communicator::limit_after(const Line& line, std::size_t passed) const {
  const auto next = std::lower_bound(line.on_device.begin(), line.on_device.end(), passed);
  const auto left = static_cast<std::size_t>(line.on_device.end() - next);
  const auto ahead = static_cast<std::size_t>(options_.receive_ahead);
  return left > ahead ? next[options_.receive_ahead] : line.tasks.size();
}

void Communicator::pass(const core::Action& recv) {
  failure_.check();
  const QueueId id = queue_of(recv.kind);
  const std::size_t position = position_of(id, recv);
  if (line(id).tasks[position].lands) landing_->due(recv);
  line(id).queue->raise(limit_after(line(id), position + 1));
}

void Communicator::send(const core::Action& send, Tensors tensors) {
  failure_.check();
  const QueueId id = queue_of(send.kind);
  Line& to = line(id);
  const std::size_t position = position_of(id, send);
  if (position != to.issued) {
    const std::string due = to.issued < to.tasks.size() ? core::to_string(to.tasks[to.issued].action) : "nothing";
    throw std::logic_error(name_ + ": " + core::to_string(send) + " is out of order; the program asks for " + due +
                           " next on this queue");
  }
  const bool small = is_small(tensors);
  const std::size_t bytes = payload_bytes(tensors);
  to.tasks[position].tensors = std::move(tensors);
  ++to.issued;
  if (is_announced(send)) arbiter_->message_begins(NicArbiter::Direction::kSend, bytes);
  if (small && transport_->sends_at_once(channel_of(id), peer_of(send)) && to.queue->run_here(position)) return;
  to.queue->raise(to.issued);
}

void Communicator::wait_done(QueueId id, std::size_t count, const core::Action& action) {
  const TransferQueue::Clock::time_point deadline = TransferQueue::Clock::now() + options_.timeout;
  TransferQueue::Outcome outcome = line(id).queue->wait(count, std::min(deadline, TransferQueue::Clock::now() + kLook));
  while (outcome == TransferQueue::Outcome::kTimeout && TransferQueue::Clock::now() < deadline) {
    if (options_.while_waiting) options_.while_waiting();
    outcome = line(id).queue->wait(count, std::min(deadline, TransferQueue::Clock::now() + kLook));
  }
  if (outcome == TransferQueue::Outcome::kTimeout) {
    fail(Failure::Kind::kTimeout,
         name_ + " waited " + seconds(options_.timeout) + " for " + describe(action) +
             " (setting comm_timeout): a rank is dead, stopped or much slower than the others; if "
             "the step is only slow, raise comm_timeout");
  }
  failure_.check();
}

bool Communicator::has_arrived(const core::Action& recv) {
  failure_.check();
  const QueueId id = queue_of(recv.kind);
  return line(id).queue->is_done(position_of(id, recv) + 1);
}

Tensors Communicator::wait(const core::Action& recv) {
  pass(recv);
  const QueueId id = queue_of(recv.kind);
  const std::size_t position = position_of(id, recv);
  Task& task = line(id).tasks[position];
  if (task.waited) throw std::logic_error(name_ + ": " + core::to_string(recv) + " was waited for twice");
  wait_done(id, position + 1, recv);
  task.waited = true;
  return std::move(task.tensors);
}

void Communicator::finish(bool is_left) {
  failure_.check();
  if (!open_) throw std::logic_error(name_ + ": finish() without begin()");
  for (std::size_t i = 0; i < kNumQueues; ++i) {
    const Line& each = lines_[i];
    for (std::size_t k = is_recv(static_cast<QueueId>(i)) ? 0 : each.issued; k < each.tasks.size(); ++k) {
      if (!each.tasks[k].waited) {
        throw std::logic_error(name_ + ": the step ends, but " + core::to_string(each.tasks[k].action) +
                               " was never done");
      }
    }
  }
  if (!is_left) end_sends();
  left_ = is_left;
  open_ = false;
}

void Communicator::end_sends() {
  for (const QueueId id : {QueueId::kSendForward, QueueId::kSendBackward}) {
    const Line& each = line(id);
    if (!each.tasks.empty()) wait_done(id, each.tasks.size(), each.tasks.back().action);
  }
  failure_.check();
  transport_->end();
}

void Communicator::abort(const std::string& reason) { fail(Failure::Kind::kAborted, reason); }

std::vector<Record> Communicator::take_records() {
  std::vector<Record> records;
  for (Line& each : lines_) each.log.take(records);
  return records;
}

void Communicator::fail(Failure::Kind kind, const std::string& text) noexcept {
  if (failure_.is_set()) return;
  const std::lock_guard lock(fail_mutex_);
  if (!failure_.set(kind, text)) return;
  for (Line& each : lines_) each.queue->stop();  // first: ends the waits, however long the transport takes
  arbiter_->open();
  if (landing_) landing_->abort(text);
  try {
    transport_->abort(text);
  } catch (...) {
    // The first error is kept already; nothing is left to tell.
  }
}

int Communicator::peer_of(const core::Action& action) const {
  return options_.shape.stage_of(core::other_end(action).chunk);
}

bool Communicator::uses_card(const core::Action& action) const {
  return core::uses_card(options_.hosts, options_.stage, peer_of(action));
}

/// Whether the arbiter hears of it here.
bool Communicator::is_announced(const core::Action& action) const {
  return uses_card(action) && !transport_->works_by_stream();
}

std::string Communicator::describe(const core::Action& action) const {
  const std::string text = core::to_string(action);
  const std::string peer = "stage " + std::to_string(peer_of(action));
  return text + (core::is_send(action.kind) ? " to " : " from ") + peer;
}

}  // namespace fold3d::comm
