#include "core/plan/plan_job.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace fold3d::core {
namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& wanted) {
  throw std::invalid_argument("plan: " + name + " is " + value + "; it must be " + wanted);
}

template <class T>
void check_size(const char* name, const std::vector<T>& values, std::size_t wanted, bool may_be_empty = false) {
  if (values.size() == wanted || (may_be_empty && values.empty())) return;
  refuse(name, std::to_string(values.size()) + " entries long", std::to_string(wanted));
}

template <class T>
void check_positive(const char* name, const std::vector<T>& values) {
  for (const T value : values) {
    if (!(value >= 0)) refuse(name, std::to_string(value), "0 or more");
    if constexpr (std::is_floating_point_v<T>) {
      if (!std::isfinite(value)) refuse(name, std::to_string(value), "finite");
    }
  }
}

void check_parameters(const char* name, const std::vector<int>& numbers, std::size_t count) {
  for (const int number : numbers) {
    if (number < 0 || static_cast<std::size_t>(number) >= count) {
      refuse(name, std::to_string(number), "the number of one of " + std::to_string(count) + " parameters");
    }
  }
}

}  // namespace

void PlanJob::check() const {
  if (std::min({dp, pp, micro_batches}) < 1) {
    refuse("the least of dp, pp and micro_batches", std::to_string(std::min({dp, pp, micro_batches})), "at least 1");
  }
  check_size("the list of hosts", hosts, static_cast<std::size_t>(dp) * static_cast<std::size_t>(pp), true);
  const std::size_t all = activation_bytes.size(), parameters = gradient_bytes.size();
  if (all == 0) refuse("the number of blocks", "0", "at least 1");
  if (starts.empty() || starts.front() != 0 || !std::is_sorted(starts.begin(), starts.end()) ||
      starts.back() >= blocks()) {
    refuse("the list of places to cut", "out of order", "ascending blocks from 0 on");
  }
  check_size("reads", reads.reads, all + 1);
  check_size("unread", reads.unread, all + 1);
  check_size("forward", forward, all + 2);
  check_size("backward", backward, all + 2);
  check_size("exposed_forward", exposed_forward, all + 2, true);
  check_size("exposed_backward", exposed_backward, all + 2, true);
  check_size("sums", sums, all + 2, true);
  check_size("layers", layers, all + 2);
  check_size("parameter_bytes", parameter_bytes, parameters);
  for (const InsideCosts& one : inside) {
    check_size("inside", one.layers, all + 2);
    check_size("inside", one.seconds, all + 2);
  }
  check_size("stage_times", stage_times, static_cast<std::size_t>(pp), true);
  check_positive("stage_times", stage_times);
  check_positive("forward", forward);
  check_positive("backward", backward);
  check_positive("activation_bytes", activation_bytes);
  check_positive("gradient_bytes", gradient_bytes);
  check_positive("parameter_bytes", parameter_bytes);
  for (const auto* lists : {&reads.reads, &reads.unread}) {
    for (const auto& list : *lists) check_parameters("a parameter that is read", list, parameters);
  }
  check_parameters("a parameter that is read", reads.before, parameters);
  check_parameters("a parameter that is read", reads.by_all, parameters);
  if (!(bandwidth > 0) || !(pp_bandwidth > 0)) {
    refuse("a bandwidth", std::to_string(std::min(bandwidth, pp_bandwidth)), "positive (bytes per second)");
  }
}

}  // namespace fold3d::core
