#include "memory/host_memory.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace fold3d::memory {
namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

/// The files of a control group's memory, and the page cache in its statistics, in the two versions of control groups.
struct Names {
  const char *limit, *used, *inactive, *active;
};
constexpr Names kFirst{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file", "total_active_file"};
constexpr Names kSecond{"/memory.max", "/memory.current", "inactive_file", "active_file"};

std::optional<std::int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // no such file, or "max"
}

/// Bytes that the group of this folder leaves.
std::int64_t left_by(const std::string& folder, const Names& names) {
  const auto limit = number_in(folder + names.limit);
  const auto used = number_in(folder + names.used);
  if (!limit || !used) return kUnlimited;
  // What files were read counts as used, but the kernel drops it before it refuses memory.
  std::int64_t dropped = 0, value = 0;
  std::ifstream statistics(folder + "/memory.stat");
  for (std::string name; statistics >> name >> value;) {
    if (name == names.inactive || name == names.active) dropped += value;
  }
  return std::max<std::int64_t>(0, *limit - std::max<std::int64_t>(0, *used - dropped));
}

/// The process's group in the hierarchy that has this controller; "": in that of the second version, which has all.
std::string group_of(const std::string& root, const std::string& controller) {
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // 4:cpu,memory:/path
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = ',' + line.substr(first + 1, second - first - 1) + ',';
    if (controllers.find(',' + controller + ',') != std::string::npos) return line.substr(second + 1);
  }
  return "/";
}

/// Bytes that the process's group leaves, and those around it, as far as they are to be seen below this mount.
std::int64_t left_below(const std::string& mount, const std::string& top, std::string group, const Names& names) {
  if (top != "/" && group.starts_with(top)) group.erase(0, top.size());  // the mount shows `top` and what is below
  std::int64_t left = left_by(mount, names);
  for (; group.size() > 1; group.erase(group.rfind('/'))) left = std::min(left, left_by(mount + group, names));
  return left;
}

/// Bytes that the limits of control groups leave.
std::int64_t left_by_groups(const std::string& root) {
  std::int64_t left = kUnlimited;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    // 35 31 0:32 /top /mounted/here rw,relatime shared:9 - cgroup source rw,memory
    std::istringstream words(line);
    std::string word, top, mount, type, options;
    words >> word >> word >> word >> top >> mount;
    while (words >> word && word != "-") {
    }
    words >> type >> word >> options;
    if (type == "cgroup2") {
      left = std::min(left, left_below(root + mount, top, group_of(root, ""), kSecond));
    } else if (type == "cgroup" && (options + ',').find(",memory,") != std::string::npos) {
      left = std::min(left, left_below(root + mount, top, group_of(root, "memory"), kFirst));
    }
  }
  return left;
}

}  // namespace

std::int64_t available_host_bytes(const std::string& root) {
  std::int64_t available = kUnlimited;
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string word; meminfo >> word;) {
    std::int64_t kibibytes = 0;
    if (word == "MemAvailable:" && meminfo >> kibibytes) available = kibibytes * 1024;
  }
  return std::min(available, left_by_groups(root));
}

std::string size_text(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits.at(unit));
  return text.data();
}

}  // namespace fold3d::memory
