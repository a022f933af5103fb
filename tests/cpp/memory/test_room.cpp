// Waiting for room in a pool: slots that come back late, messages that land early.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/errors.h"
#include "memory/copy_lane.h"
#include "memory/host_pool.h"
#include "memory/host_tier.h"
#include "memory/room/landing_room.h"
#include "memory/room/slot_wait.h"
#include "memory/room/slot_write.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kPage = Tier::kAlignment;

HostPool pool_of(std::size_t pages) {
  return {[](std::size_t bytes) { return std::make_shared<HostTier>(bytes); }, pages * kPage};
}

core::Action recv(int micro_batch) { return {2, core::Kind::kRecvForward, micro_batch}; }

/// A lane whose copies of a page take `time`.
struct SlowLane {
  explicit SlowLane(std::chrono::milliseconds time)
      : lane("in", std::make_shared<CopyRate>(1000.0 * kPage / static_cast<double>(time.count()))) {}
  /// Gives `slot` back when its copy is done.
  void bring(Slot slot) {
    lane.submit({}, kPage, [slot = std::move(slot)] {});
  }
  CopyLane lane;
};

TEST(Room, WhatALateCopyWillGiveBackIsWaitedFor) {
  HostPool pool = pool_of(2);
  SlowLane in(50ms);
  int waits = 0;
  const auto wait = [&](CopyLane::Ticket ticket) {
    ++waits;
    in.lane.wait(ticket, 10s);
  };
  Slot first = pool.take(kPage, "0OFFLOAD0");
  const Slot second = pool.take(kPage, "0OFFLOAD1");
  in.bring(std::move(first));
  EXPECT_EQ(pool.counters().in_use, static_cast<std::int64_t>(2 * kPage));
  const Slot third = take_waiting(pool, in.lane, kPage, "0OFFLOAD2", wait);
  EXPECT_TRUE(third);
  EXPECT_EQ(waits, 1);
  try {
    take_waiting(pool, in.lane, kPage, "0OFFLOAD3", wait);
    ADD_FAILURE() << "there is no room, and none will come";
  } catch (const PoolError& error) {
    EXPECT_NE(std::string(error.what()).find("0OFFLOAD3"), std::string::npos) << error.what();
  }
  EXPECT_EQ(waits, 1);
}

/// A wait that ended before the lane came to the copy once freed the message: the lane then read freed memory, and the
/// pool got garbage.
TEST(Room, WhatIsCopiedOutlivesAWaitThatEndsBefore) {
  HostPool pool = pool_of(1);
  const Slot slot = pool.take(kPage, "0RECV_F0");
  CopyLane out("out", std::make_shared<CopyRate>(0.0));
  std::promise<void> goes;
  out.submit({}, 0, [goes = goes.get_future().share()] { goes.wait(); });
  auto message = std::make_shared<std::vector<std::byte>>(kPage, std::byte{7});
  const std::weak_ptr<std::vector<std::byte>> alive = message;
  const Pieces pieces = {{message->data(), kPage, 0}};
  EXPECT_THROW(write_waiting(out, recv(0), slot, pieces, std::move(message), 1ms), PoolError);
  EXPECT_FALSE(alive.expired());
  goes.set_value();
  out.wait_for_all(10s);
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(slot.data()[0], std::byte{7});
  EXPECT_EQ(slot.data()[kPage - 1], std::byte{7});
}

TEST(Room, EarlyMessagesHaveWhatIsSpareAndTheOthersWaitUntilTheyAreDue) {
  HostPool pool = pool_of(4);
  SlowLane in(1ms);
  LandingRoom room(pool, in.lane, 10s);
  room.begin(2 * kPage);
  std::vector<Slot> landed;
  landed.push_back(room.take(recv(0), kPage));
  landed.push_back(room.take(recv(1), kPage));
  auto third = std::async(std::launch::async, [&] { return room.take(recv(2), kPage); });
  EXPECT_EQ(third.wait_for(20ms), std::future_status::timeout);
  room.due(recv(0));  // no longer early: the spare room is the third's
  landed.push_back(third.get());
  auto fourth = std::async(std::launch::async, [&] { return room.take(recv(3), kPage); });
  EXPECT_EQ(fourth.wait_for(20ms), std::future_status::timeout);
  room.due(recv(1));
  landed.push_back(fourth.get());
  for (const int k : {2, 3, 4}) room.due(recv(k));
  EXPECT_THROW(room.take(recv(4), kPage), PoolError);
  room.begin(0);
  landed.clear();
  auto next = std::async(std::launch::async, [&] { return room.take(recv(0), kPage); });
  EXPECT_EQ(next.wait_for(20ms), std::future_status::timeout);  // it is not due in this run
  room.due(recv(0));
  EXPECT_TRUE(next.get());
}

TEST(Room, ADueMessageWaitsForALateCopy) {
  HostPool pool = pool_of(1);
  SlowLane in(50ms);
  LandingRoom room(pool, in.lane, 10s);
  room.begin(0);
  in.bring(pool.take(kPage, "2RECV_F0"));
  room.due(recv(1));
  EXPECT_TRUE(room.take(recv(1), kPage));
}

TEST(Room, AGrowingPoolTakesAnyNumberEarly) {
  HostPool pool([](std::size_t bytes) { return std::make_shared<HostTier>(bytes); }, 0);
  SlowLane in(1ms);
  LandingRoom room(pool, in.lane, 10s);
  room.begin(LandingRoom::kAnyNumber);
  std::vector<Slot> landed;
  for (int k = 0; k < 20; ++k) landed.push_back(room.take(recv(k), 3 * kPage));
  EXPECT_EQ(pool.counters().in_use, static_cast<std::int64_t>(60 * kPage));
}

TEST(Room, AnAbortEndsTheWait) {
  HostPool pool = pool_of(1);
  SlowLane in(1ms);
  LandingRoom room(pool, in.lane, 10s);
  room.begin(0);
  auto waiting = std::async(std::launch::async, [&] { return room.take(recv(0), kPage); });
  EXPECT_EQ(waiting.wait_for(20ms), std::future_status::timeout);
  room.abort("rank 1 is gone");
  EXPECT_THROW(waiting.get(), comm::AbortedError);
  EXPECT_THROW(room.take(recv(1), kPage), comm::AbortedError);
}

TEST(Room, ThreadsThatTakeGiveBackAndSayWhatIsDueNeverMeetAFullPool) {
  constexpr int kMessages = 200;
  HostPool pool = pool_of(4);  // two that are due and not used yet, two early ones
  SlowLane in(1ms);
  LandingRoom room(pool, in.lane, 10s);
  room.begin(2 * kPage);
  std::vector<std::promise<Slot>> landed(kMessages);
  auto receiver = std::async(std::launch::async, [&] {
    for (int k = 0; k < kMessages; ++k) landed[static_cast<std::size_t>(k)].set_value(room.take(recv(k), kPage));
  });
  for (int k = 0; k < kMessages + 2; ++k) {
    if (k < kMessages) room.due(recv(k));
    if (k < 2) continue;
    in.bring(landed[static_cast<std::size_t>(k - 2)].get_future().get());
    in.lane.wait(static_cast<CopyLane::Ticket>(k - 1), 10s);
  }
  receiver.get();
  EXPECT_EQ(pool.counters().in_use, 0);
}

}  // namespace
}  // namespace fold3d::memory
