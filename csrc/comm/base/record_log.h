#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/base/moment.h"
#include "comm/base/record.h"

namespace fold3d::comm {

/// Records of one queue. Thread-safe; the queue appends, anybody takes.
class RecordLog {
 public:
  /// `times`: those of the record, where the device does by itself what it was told in those that it has; else null.
  void append(const Record& record, std::shared_ptr<LaterInterval> times = nullptr) {
    const std::lock_guard lock(mutex_);
    entries_.push_back({record, std::move(times)});
  }

  /// Moves all records to the end of `out`, in the order of completion, but for those whose times are not known yet and
  /// what comes after them.
  void take(std::vector<Record>& out) {
    const std::lock_guard lock(mutex_);
    const auto is_known = [](Entry& entry) {
      if (!entry.times) return true;
      const std::optional<Interval> known = entry.times->known();
      if (known) std::tie(entry.record.start_ns, entry.record.end_ns) = std::tie(known->start_ns, known->end_ns);
      return known.has_value();
    };
    for (const Entry& entry : take_known(entries_, is_known)) out.push_back(entry.record);
  }

 private:
  struct Entry {
    Record record;
    std::shared_ptr<LaterInterval> times;
  };

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace fold3d::comm
