#pragma once

#include <mutex>
#include <vector>

#include "comm/base/record.h"

namespace fold3d::comm {

/// Records of one queue. Thread-safe; the queue appends, anybody takes.
class RecordLog {
 public:
  void append(const Record& record) {
    const std::lock_guard lock(mutex_);
    records_.push_back(record);
  }

  /// Moves all records to the end of `out`, in the order of completion.
  void take(std::vector<Record>& out) {
    const std::lock_guard lock(mutex_);
    out.insert(out.end(), records_.begin(), records_.end());
    records_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<Record> records_;
};

}  // namespace fold3d::comm
