// The arbiter that the ranks of a host share: several arbiters of one name, here and in forked processes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/arbiter/shared_memory.h"
#include "comm/base/clock.h"
#include "comm/base/errors.h"
#include "harness/shared_name.h"

namespace fold3d::test {
namespace {

using comm::NicArbiter;
using Direction = NicArbiter::Direction;
using Traffic = NicArbiter::Traffic;

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kForever = 60'000 * kMillisecond;
constexpr std::int64_t kShort = 100 * kMillisecond;  // still longer than this process may be kept from running
const NicArbiter::Options kPatient{.rule = {.message_patience_ns = kForever, .slice_patience_ns = kForever}};

const NicArbiter::Options kQuick{.rule = {.message_patience_ns = kShort, .slice_patience_ns = kForever}};

/// A forked process; killed and collected at the end. The forked one starts no threads and never returns.
class Child {
 public:
  explicit Child(const std::function<void()>& run) : pid_(::fork()) {
    if (pid_ != 0) return;
    int status = 1;
    try {
      run();
      status = 0;
    } catch (...) {
      // The status tells.
    }
    ::_exit(status);
  }
  ~Child() {
    if (pid_ > 0) kill();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void kill() {
    ::kill(pid_, SIGKILL);
    wait();
  }
  bool succeeded() {
    const int status = wait();
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  int wait() {
    int status = -1;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

  pid_t pid_;
};

/// Lets one process wait for another.
class Signal {
 public:
  Signal() { EXPECT_EQ(::pipe(ends_), 0); }
  ~Signal() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;
  void give() const {
    const char byte = 0;
    if (::write(ends_[1], &byte, 1) != 1) ::_exit(2);
  }
  void take() const {
    char byte = 0;
    if (::read(ends_[0], &byte, 1) != 1) ::_exit(2);
  }

 private:
  int ends_[2] = {-1, -1};
};

TEST(SharedGate, GatesOfOneNameSeeEachOthersMessages) {
  const SharedName name("pair");
  NicArbiter mine(name.text(), kQuick);
  {
    NicArbiter other(name.text(), kQuick);
    other.set_bandwidth(1e6);
    other.message_begins(Direction::kSend, 1'000);
    EXPECT_GT(mine.hold(Direction::kSend, Traffic::kReduce), 0);
    EXPECT_EQ(mine.counters().messages, 0);
    EXPECT_EQ(mine.counters().preemptions, 1);
    other.slice_begins();
    EXPECT_GT(mine.hold(Direction::kSend, Traffic::kGather), 0);
  }
  // The other went without ending them: nothing is left of it.
  EXPECT_EQ(mine.hold(Direction::kSend, Traffic::kGather), 0);
}

TEST(SharedGate, OpeningOneGateDoesNotOpenTheOthers) {
  const SharedName name("open");
  NicArbiter failed(name.text(), kPatient);
  NicArbiter healthy(name.text(), kQuick);
  failed.message_begins(Direction::kSend, 1);
  failed.open();
  EXPECT_EQ(healthy.hold(Direction::kSend, Traffic::kReduce), 0);
  healthy.message_begins(Direction::kSend, 1);
  EXPECT_EQ(failed.hold(Direction::kSend, Traffic::kReduce), 0);
  EXPECT_GT(healthy.hold(Direction::kSend, Traffic::kReduce), 0);
}

TEST(SharedGate, AfterUnlinkTheNameIsFreeAndTheGateWorks) {
  const SharedName name("unlink");
  NicArbiter first(name.text(), kQuick);
  first.message_begins(Direction::kSend, 1);
  first.unlink();
  first.unlink();
  EXPECT_GT(first.hold(Direction::kSend, Traffic::kReduce), 0);
  NicArbiter second(name.text(), kPatient);
  EXPECT_EQ(second.hold(Direction::kSend, Traffic::kReduce), 0);
}

TEST(SharedGate, MemoryOfAnotherSizeOrVersionIsRefused) {
  const SharedName size("size"), version("version");
  const comm::SharedMemory small(size.text(), 64);
  EXPECT_THROW(NicArbiter{size.text()}, comm::CommError);
  {
    NicArbiter arbiter(version.text());
  }
  const int fd = ::shm_open(("/" + version.text()).c_str(), O_RDWR, 0);
  const std::uint64_t wrong = 12345;
  ASSERT_EQ(::pwrite(fd, &wrong, sizeof(wrong), 0), static_cast<ssize_t>(sizeof(wrong)));
  ::close(fd);
  EXPECT_THROW(NicArbiter{version.text()}, comm::CommError);
  EXPECT_THROW(NicArbiter{"no/such/place"}, comm::CommError);
}

TEST(SharedGate, AHoldIsWokenByAnotherProcess) {
  const SharedName name("wake");
  NicArbiter arbiter(name.text(), kPatient);
  constexpr int kRounds = 300;
  const Signal begun, held;
  const std::int64_t start = comm::now_ns();
  Child child([&] {
    NicArbiter own(name.text(), kPatient);
    for (int k = 0; k < kRounds; ++k) {
      own.message_begins(Direction::kSend, 1);
      begun.give();
      for (int i = 0; i < k % 20; ++i) ::sched_yield();  // now before, now after the other waits
      own.message_ends(Direction::kSend);
      held.take();
    }
  });
  for (int k = 0; k < kRounds; ++k) {
    begun.take();
    arbiter.hold(Direction::kSend, Traffic::kReduce);
    held.give();
  }
  EXPECT_TRUE(child.succeeded());
  EXPECT_LT(comm::now_ns() - start, kForever);  // one wake-up lost would take that long
}

TEST(SharedGate, ManyProcessesLeaveNobodyWaiting) {
  const SharedName name("many");
  const std::int64_t start = comm::now_ns();
  {
    std::vector<std::unique_ptr<Child>> children;
    for (int index = 0; index < 4; ++index) {
      children.push_back(std::make_unique<Child>([&, index] {
        NicArbiter arbiter(name.text(), kPatient);  // created by whoever comes first
        for (int k = 0; k < 500; ++k) {
          arbiter.message_begins(index % 2 == 0 ? Direction::kSend : Direction::kReceive, 64);
          arbiter.message_ends(index % 2 == 0 ? Direction::kSend : Direction::kReceive);
          arbiter.hold(Direction::kSend, index < 2 ? Traffic::kReduce : Traffic::kGather);
          arbiter.slice_begins(64);
          arbiter.slice_ends();
        }
      }));
    }
    for (const auto& child : children) EXPECT_TRUE(child->succeeded());
  }
  EXPECT_LT(comm::now_ns() - start, kForever);
  NicArbiter arbiter(name.text(), kPatient);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);
  EXPECT_EQ(arbiter.hold(Direction::kReceive, Traffic::kGather), 0);
}

TEST(SharedGate, AProcessKilledInTheMiddleOfAMessageCostsPatienceOnly) {
  const SharedName name("killed");
  const NicArbiter::Options options{
      .rule = {.message_patience_ns = 20 * kMillisecond, .slice_patience_ns = 40 * kMillisecond}};
  NicArbiter arbiter(name.text(), options);
  const Signal begun;
  Child child([&] {
    NicArbiter own(name.text(), options);
    own.message_begins(Direction::kSend, 1'000);
    own.slice_begins();
    begun.give();
    own.hold(Direction::kSend, Traffic::kReduce);
    for (;;) ::pause();
  });
  begun.take();
  child.kill();
  arbiter.hold(Direction::kSend, Traffic::kGather);
  EXPECT_EQ(arbiter.hold(Direction::kSend, Traffic::kGather), 0);  // the dead one's patience is used up
  for (int k = 0; k < 3; ++k) {
    arbiter.message_begins(Direction::kSend, 1);
    arbiter.message_ends(Direction::kSend);
    const std::int64_t held = arbiter.hold(Direction::kSend, Traffic::kGather);  // the count never gets to zero again
    EXPECT_LE(held, 30'000 * kMillisecond);
  }
  arbiter.message_begins(Direction::kReceive, 1);
  arbiter.message_ends(Direction::kReceive);
  EXPECT_EQ(arbiter.hold(Direction::kReceive, Traffic::kReduce), 0);  // and other kinds never notice
}

TEST(SharedGate, AForkedCopyTakesBackNothing) {
  using Ending = std::function<void(std::unique_ptr<NicArbiter>&)>;
  const Ending destroys = [](auto& arbiter) { arbiter.reset(); }, opens = [](auto& arbiter) { arbiter->open(); };
  for (const Ending& end : {destroys, opens}) {
    const SharedName name("forked");
    NicArbiter other(name.text(), kPatient);
    auto mine = std::make_unique<NicArbiter>(name.text(), kPatient);
    mine->message_begins(Direction::kSend, 1);
    Child child([&] { end(mine); });
    EXPECT_TRUE(child.succeeded());
    EXPECT_GT(other.hold(Direction::kSend, Traffic::kReduce, kMillisecond), 0) << "the parent's message is under way";
    mine->message_ends(Direction::kSend);
    mine->message_begins(Direction::kReceive, 1);
    mine->message_ends(Direction::kReceive);
    EXPECT_EQ(other.hold(Direction::kReceive, Traffic::kReduce, kMillisecond), 0)
        << "a count below 0 takes from the next one";
  }
}

}  // namespace
}  // namespace fold3d::test
