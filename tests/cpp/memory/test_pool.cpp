// Slots, tiers and the pool over them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>

#include "harness/complaint.h"
#include "harness/folder.h"
#include "memory/disk_tier.h"
#include "memory/host_pool.h"
#include "memory/host_tier.h"
#include "memory/slot/slots.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {
namespace {

using test::complaint_of;
using test::contains;
using test::Folder;

HostPool::MakeTier in_memory() {
  return [](std::size_t bytes) { return std::make_shared<HostTier>(bytes); };
}

TEST(Slots, RandomTakingAndGivingBackNeverOverlapsAndEndsWhole) {
  std::mt19937 random(7);
  Slots slots(10'000);
  std::map<std::size_t, std::size_t> taken;
  for (int round = 0; round < 5000; ++round) {
    if (random() % 2 == 0) {
      const std::size_t bytes = 1 + random() % 900;
      const auto begin = slots.take(bytes);
      if (!begin) {
        EXPECT_LT(slots.largest_free(), bytes);
        continue;
      }
      const auto after = taken.lower_bound(*begin);
      EXPECT_TRUE(after == taken.end() || after->first >= *begin + bytes);
      EXPECT_TRUE(after == taken.begin() || std::prev(after)->first + std::prev(after)->second <= *begin);
      taken.emplace(*begin, bytes);
    } else if (!taken.empty()) {
      const auto some = std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size()));
      slots.give_back(some->first, some->second);
      taken.erase(some);
    }
  }
  for (const auto& [begin, bytes] : taken) slots.give_back(begin, bytes);
  EXPECT_EQ(slots.largest_free(), 10'000u);
  EXPECT_THROW(slots.give_back(5, 10), std::logic_error);
}

TEST(Slots, TheSmallestPartThatFitsIsTaken) {
  Slots slots(100);
  EXPECT_EQ(slots.take(10), 0u);
  EXPECT_EQ(slots.take(30), 10u);
  EXPECT_EQ(slots.take(10), 40u);
  slots.give_back(10, 30);
  EXPECT_EQ(slots.take(20), 10u);  // of 30 and 50 free
}

void expect_what_was_written(Tier& tier) {
  std::mt19937 random(3);
  std::vector<std::vector<std::byte>> out, in;
  Pieces from, to;
  std::size_t offset = 0;
  for (const std::size_t bytes : {1u, 4095u, 4096u, 70'000u, 5'000'000u, 64u, 4'194'304u, 17u}) {
    out.emplace_back(bytes);
    for (std::byte& each : out.back()) each = static_cast<std::byte>(random());
    in.emplace_back(bytes);
    offset = (offset + 63) / 64 * 64;
    from.push_back({out.back().data(), bytes, offset});
    to.push_back({in.back().data(), bytes, offset});
    offset += bytes;
  }
  tier.write(8192, from);
  tier.read(8192, to);
  EXPECT_EQ(in, out);
}

TEST(Tier, GivesBackWhatWasWritten) {
  HostTier memory(16u << 20);
  expect_what_was_written(memory);
  const Folder folder;
  DiskTier disk(16u << 20, folder.path());
  expect_what_was_written(disk);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));  // nothing stays, even of a process that is killed
}

TEST(Tier, MoreMemoryThanTheHostHasIsRefusedBeforeItIsReserved) {
  bool asked = false;
  const std::string text = complaint_of<PoolError>([&] {
    HostTier(std::size_t{1} << 60, [&](std::size_t) {
      asked = true;
      return std::shared_ptr<std::byte>();
    });
  });
  EXPECT_TRUE(contains(text, "lower offload_pool")) << text;
  EXPECT_FALSE(asked);
}

TEST(Tier, AFailedReservationSaysWhy) {
  const std::string text = complaint_of<PoolError>([] {
    HostTier(4096, [](std::size_t) -> std::shared_ptr<std::byte> { throw std::runtime_error("out of locked pages"); });
  });
  EXPECT_TRUE(contains(text, "out of locked pages") && contains(text, "ulimit -l")) << text;
}

TEST(Tier, ADiskWithoutRoomOrFolderIsRefusedBeforeAnythingIsWritten) {
  const Folder folder;
  const std::string full = complaint_of<PoolError>([&] { DiskTier(std::size_t{1} << 55, folder.path()); });
  EXPECT_TRUE(contains(full, "no room") && contains(full, "free")) << full;
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  const std::string missing = complaint_of<PoolError>([&] { DiskTier(4096, folder.path() + "/nowhere"); });
  EXPECT_TRUE(contains(missing, "offload_disk=") && contains(missing, "nowhere")) << missing;
}

TEST(Tier, ADisksErrorIsTheOneThatKeptItsFileFromBeingMade) {
  const Folder folder;
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string text = complaint_of<PoolError>([&] { DiskTier(4096, folder.path()); });
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_TRUE(contains(text, std::strerror(EMFILE))) << text;
}

/// Names of files that came into being in a folder since then.
class Watch {
 public:
  explicit Watch(const std::string& folder) : file_(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC)) {
    EXPECT_GE(::inotify_add_watch(file_, folder.c_str(), IN_CREATE), 0) << std::strerror(errno);
  }
  ~Watch() { ::close(file_); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  bool saw_one() const {
    alignas(inotify_event) std::array<char, 4096> events{};
    return ::read(file_, events.data(), events.size()) > 0;
  }

 private:
  const int file_;
};

TEST(Tier, ADisksFileNeverHasAName) {
  const Folder folder;
  const Watch watch(folder.path());
  const int probe = ::open(folder.path().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (probe < 0) GTEST_SKIP() << "no file system of temporary files: " << std::strerror(errno);
  ::close(probe);
  const DiskTier disk(4096, folder.path());
  EXPECT_FALSE(watch.saw_one()) << "whoever kills the process now leaves it there";
}

/// From now on this thread makes no files without a name, as on a file system that knows none. Returns whether that is
/// so.
bool refuse_nameless_files() {
  std::array<sock_filter, 6> program{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, O_TMPFILE & ~O_DIRECTORY, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EOPNOTSUPP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{.len = program.size(), .filter = program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(Tier, ADiskThatKnowsNoNamelessFilesWorks) {
  const Folder folder;
  bool refused = false;
  std::thread([&] {
    refused = refuse_nameless_files();
    DiskTier disk(16u << 20, folder.path());
    expect_what_was_written(disk);
  }).join();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  if (!refused) GTEST_SKIP() << "this system filters no calls";
}

TEST(HostPool, SlotsOutliveThePoolAndComeBack) {
  Slot slot;
  {
    HostPool pool(in_memory(), 1u << 20);
    slot = pool.take(1000, "0OFFLOAD0");
    EXPECT_EQ(pool.counters().in_use, 4096);
    {
      const Slot other = pool.take(5000, "0OFFLOAD1");
      EXPECT_EQ(pool.counters().in_use, 3 * 4096);
    }
    EXPECT_EQ(pool.counters().in_use, 4096);
    EXPECT_EQ(pool.counters().peak, 3 * 4096);
  }
  std::memset(slot.data(), 1, slot.bytes());
}

TEST(HostPool, OneOfAFixedSizeIsFullAndSaysWhatItHas) {
  HostPool pool(in_memory(), 3 * 4096);
  const Slot first = pool.take(8192, "0OFFLOAD0");
  const std::string text = complaint_of<PoolError>([&] { pool.take(8192, "0OFFLOAD1"); });
  EXPECT_TRUE(contains(text, "0OFFLOAD1 needs 8.19 kB, 4.10 kB of 12.29 kB are free")) << text;
  EXPECT_TRUE(contains(text, "raise offload_pool")) << text;
}

TEST(HostPool, WhatIsFreeSufficesHoweverItLies) {
  const Folder folder;
  const std::vector<HostPool::MakeTier> makers = {
      in_memory(), [&](std::size_t bytes) { return std::make_shared<DiskTier>(bytes, folder.path()); }};
  for (const HostPool::MakeTier& make : makers) {
    HostPool pool(make, 8 * 4096);
    std::vector<Slot> slots;
    for (int k = 0; k < 8; ++k) slots.push_back(pool.take(4096, "0OFFLOAD0"));
    for (const std::size_t k : {0u, 2u, 3u, 7u}) slots[k] = {};
    EXPECT_FALSE(pool.try_take(4 * 4096 + 1));
    Slot scattered = pool.take(4 * 4096, "0OFFLOAD1");
    EXPECT_EQ(scattered.data(), nullptr);  // in pieces
    EXPECT_EQ(scattered.bytes(), 4u * 4096);
    std::mt19937 random(5);
    std::vector<std::byte> out(4 * 4096 - 100), in(out.size());
    for (std::byte& each : out) each = static_cast<std::byte>(random());
    const Pieces from = {{out.data(), 5000, 64}, {out.data() + 5000, out.size() - 5000, 5100}};
    const Pieces to = {{in.data(), 5000, 64}, {in.data() + 5000, in.size() - 5000, 5100}};
    scattered.write(from);
    slots[1].write({{out.data(), 4096, 0}});  // its neighbours are others'
    scattered.read(to);
    EXPECT_EQ(in, out);
    EXPECT_EQ(scattered.is_addressable(), slots[1].data() != nullptr);
    std::size_t sum = 0;
    for (const Slot::Span& span : scattered.spans(4000, 9000)) sum += span.bytes;
    EXPECT_EQ(sum, 9000u);
    scattered = {};
    slots.clear();
    EXPECT_EQ(pool.counters().in_use, 0);
    EXPECT_EQ(pool.take(8 * 4096, "0OFFLOAD2").spans(0, 8 * 4096).size(), 1u);  // whole again
  }
}

TEST(HostPool, OneWithoutASizeReservesWhatIsAskedForAtOnceAndMoreWhenItMust) {
  std::vector<std::size_t> made;
  HostPool pool(
      [&](std::size_t bytes) {
        made.push_back(bytes);
        return std::make_shared<HostTier>(bytes);
      },
      0);
  pool.reserve(40'960);
  std::vector<Slot> slots;
  for (int k = 0; k < 10; ++k) slots.push_back(pool.take(4096, "0OFFLOAD0"));
  EXPECT_EQ(made, std::vector<std::size_t>{40'960});
  slots.push_back(pool.take(5000, "0OFFLOAD0"));
  EXPECT_EQ(made.back(), 8192u);
  EXPECT_EQ(pool.counters().bytes, 49'152);
  slots.clear();
  pool.reserve(57'344);
  EXPECT_EQ(made.back(), 8192u) << "what is free counts: slots may lie in several pieces";
  EXPECT_EQ(made.size(), 3u);
}

}  // namespace
}  // namespace fold3d::memory
