#include "comm/tensor/tensor_account.h"

#include <utility>

#include "comm/base/clock.h"

namespace fold3d::comm {

/// With the lock; returns the time.
std::int64_t TensorAccount::advance() {
  const std::int64_t now = now_ns();
  if (waiting_ > 0) {
    counters_.waited_ns += now - counted_ns_;
  } else if (under_way_ > 0) {
    counters_.hidden_ns += now - counted_ns_;
  }
  return counted_ns_ = now;
}

std::int64_t TensorAccount::begin() {
  const std::lock_guard lock(mutex_);
  const std::int64_t now = advance();
  ++under_way_;
  return now;
}

void TensorAccount::end(Record record) {
  const std::lock_guard lock(mutex_);
  record.end_ns = advance();
  if (record.start_ns != 0) {
    --under_way_;
  } else {
    record.start_ns = record.issued_ns;
  }
  ++counters_.exchanges;
  counters_.bytes += static_cast<std::int64_t>(record.bytes);
  counters_.transfer_ns += record.end_ns - record.start_ns;
  if (keep_records_) records_.push_back(record);
}

void TensorAccount::begin_wait() {
  const std::lock_guard lock(mutex_);
  const std::int64_t now = advance();
  if (waiting_++ == 0) waiting_since_ns_ = now;
}

void TensorAccount::end_wait() {
  const std::lock_guard lock(mutex_);
  const std::int64_t now = advance();
  if (--waiting_ == 0 && keep_records_) waits_.push_back({.start_ns = waiting_since_ns_, .end_ns = now});
}

void TensorAccount::keep_records(bool keep) {
  const std::lock_guard lock(mutex_);
  keep_records_ = keep;
  if (keep) return;
  records_.clear();
  waits_.clear();
}

std::vector<TensorAccount::Record> TensorAccount::take_records() {
  const std::lock_guard lock(mutex_);
  return std::exchange(records_, {});
}

std::vector<TensorAccount::Wait> TensorAccount::take_waits() {
  const std::lock_guard lock(mutex_);
  return std::exchange(waits_, {});
}

TensorAccount::Counters TensorAccount::counters() {
  const std::lock_guard lock(mutex_);
  advance();
  return counters_;
}

}  // namespace fold3d::comm
