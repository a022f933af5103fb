// What the host's memory has left, as the kernel's files tell it: a folder stands for the root of the file system.
#include "memory/host_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "harness/folder.h"

namespace fold3d::memory {
namespace {

class Host {
 public:
  Host() {
    write("/proc/meminfo", "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n");
  }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_.path() + path).parent_path());
    std::ofstream(root_.path() + path) << text;
  }
  /// A mount of the second version, which shows the groups from `top` on, and the process's group.
  void mount_second(const std::string& top, const std::string& group) const {
    write("/proc/self/mountinfo", "30 23 0:27 / /proc rw - proc proc rw\n31 23 0:28 " + top +
                                      " /sys/fs/cgroup rw,nosuid shared:4 master:9 - cgroup2 cgroup rw,nsdelegate\n");
    write("/proc/self/cgroup", "0::" + group + "\n");
  }
  void limit_second(const std::string& group, const std::string& limit, std::int64_t used, std::int64_t files) const {
    const std::string folder = "/sys/fs/cgroup" + group;
    write(folder + "/memory.max", limit + "\n");
    write(folder + "/memory.current", std::to_string(used) + "\n");
    write(folder + "/memory.stat", "anon 1000\nfile 77\ninactive_anon 5\nactive_anon 5\ninactive_file " +
                                       std::to_string(files) + "\nactive_file 1000\nunevictable 0\n");
  }
  void mount_first(const std::string& top, const std::string& group) const {
    write("/proc/self/mountinfo", "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n35 31 0:32 " + top +
                                      " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                                      "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    write("/proc/self/cgroup", "5:cpu:/elsewhere\n4:hugetlb,memory:" + group + "\n0::/\n");
  }
  void limit_first(const std::string& group, std::int64_t limit, std::int64_t used, std::int64_t files) const {
    const std::string folder = "/sys/fs/cgroup/memory" + group;
    write(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(folder + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    write(folder + "/memory.stat", "inactive_file 1\nactive_file 2\ntotal_inactive_file " + std::to_string(files) +
                                       "\ntotal_active_file 1000\n");
  }
  std::int64_t available() const { return available_host_bytes(root_.path()); }

 private:
  const test::Folder root_;
};

constexpr std::int64_t kOfHost = 20'480'000'000;
constexpr std::int64_t kNoLimit = 9'223'372'036'854'771'712;  // what the first version says then

TEST(HostMemory, IsKnownAndReadable) {
  EXPECT_GT(available_host_bytes(), 0);
  EXPECT_EQ(size_text(999), "999 B");
  EXPECT_EQ(size_text(7'980'000'000), "7.98 GB");
}

TEST(HostMemory, WithoutGroupsItIsWhatTheKernelCallsAvailable) {
  const Host host;
  EXPECT_EQ(host.available(), kOfHost);
  EXPECT_EQ(available_host_bytes("/there/is/no/such/root"), std::numeric_limits<std::int64_t>::max());
}

TEST(HostMemory, CachedFilesOfAGroupAreAvailable) {
  // The weights were just read: nine tenths of the limit are in use, and a pool of half of it fits all the same.
  const Host host;
  host.mount_second("/", "/");
  host.limit_second("", "1000000", 900'000, 600'000);
  EXPECT_EQ(host.available(), 1'000'000 - (900'000 - 601'000));
  host.limit_second("", "1000000", 1'000'000, 0);
  EXPECT_EQ(host.available(), 1000);
  host.limit_second("", "max", 900'000, 0);
  EXPECT_EQ(host.available(), kOfHost);
}

TEST(HostMemory, TheGroupIsTheProcesssOwnAndTheSmallestAroundItCounts) {
  const Host host;
  host.mount_second("/", "/machine.slice/job/rank");
  host.limit_second("/machine.slice", "9000000", 1000, 0);
  host.limit_second("/machine.slice/job", "2000000", 1'001'000, 0);
  host.limit_second("/machine.slice/job/rank", "max", 1000, 0);
  host.limit_second("/machine.slice/other", "1000", 1000, 0);
  EXPECT_EQ(host.available(), 1'000'000);
}

TEST(HostMemory, GroupsOfTheFirstVersionHaveLimitsToo) {
  const Host host;
  host.mount_first("/", "/docker/abc");
  host.limit_first("", kNoLimit, 5'000'000'000, 0);
  host.limit_first("/docker", kNoLimit, 5'000'000'000, 0);
  host.limit_first("/docker/abc", 536'870'912, 400'001'000, 300'000'000);
  EXPECT_EQ(host.available(), 436'870'912);
}

TEST(HostMemory, AContainerMaySeeItsOwnGroupOnly) {
  const Host first;
  first.mount_first("/docker/abc", "/docker/abc");  // without a namespace of its own it is still told the whole path
  first.limit_first("", 536'870'912, 1000, 0);
  EXPECT_EQ(first.available(), 536'870'912);
  const Host second;
  second.mount_second("/", "/../../elsewhere");  // with one, what is outside of it
  second.limit_second("", "536870912", 1000, 0);
  EXPECT_EQ(second.available(), 536'870'912);
}

}  // namespace
}  // namespace fold3d::memory
