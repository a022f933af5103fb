#pragma once

#include <cstdint>
#include <string>

namespace simdevice {

/// What orders work on streams, or the host with it.
enum class Ordering { kEventBlock, kEventSynchronize, kEventQuery, kRecordStream, kWorkWait, kNews };

/// From now on the threads of that name ("main": the one that runs Python's) do `ordering` without any effect, as if
/// the program had forgotten it: a test asks whether the detector notices. One at a time. `ordering`: "event_block",
/// "event_synchronize", "event_query" (says at once that it has passed), "record_stream", "work_wait", "news" (that it
/// has passed, which is said rightly, but orders nothing). Throws std::invalid_argument for another.
void leave_out(const std::string& ordering, const std::string& thread);

/// Ends that. Returns how often something was left out.
std::int64_t leave_nothing_out();

/// Whether the calling thread leaves it out.
bool is_left_out(Ordering ordering);

}  // namespace simdevice
