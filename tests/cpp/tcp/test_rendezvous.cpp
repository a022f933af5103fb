// The rendezvous of a rank: who gets in, who does not, and that nobody at it holds up another.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/base/errors.h"
#include "comm/rendezvous/tcp_rendezvous.h"
#include "comm/tcp/tcp_peers.h"
#include "comm/tcp/tcp_ring_peers.h"
#include "harness/stranger.h"

namespace fold3d::test {
namespace {

using namespace std::chrono_literals;
using comm::ConnectionId;
using comm::Greeting;
using comm::Handshake;
using comm::Nonce;
using comm::TcpPeers;
using comm::TcpRendezvous;
using Clock = comm::TcpSocket::Clock;

const std::string kSecret(32, 's');
constexpr ConnectionId kLine{.number = 0, .caller = 1, .callee = 0};

TcpRendezvous::Job job(const std::string& name = "") { return {.secret = kSecret, .name = name}; }

/// Rank 0, which lets rank 1 in, in a thread of its own.
class Host {
 public:
  explicit Host(std::chrono::milliseconds timeout = 20s, const std::string& name = "")
      : rendezvous("127.0.0.1", job(name)), found_(std::async(std::launch::async, [this, timeout] {
          return rendezvous.meet({}, {kLine}, Clock::now() + timeout);
        })) {}

  /// The guest's connection. Throws what meet() throws.
  std::unique_ptr<comm::TcpSocket> guest() { return std::move(found_.get().incoming.at(0)); }

  TcpRendezvous rendezvous;

 private:
  std::future<TcpRendezvous::Connections> found_;
};

/// Rank 1 calls at the rendezvous of rank 0; the text of its error, or an empty one.
std::string call(const comm::Endpoint& to, std::chrono::milliseconds timeout = 20s, const std::string& name = "") {
  TcpRendezvous own("127.0.0.1", job(name));
  try {
    const auto found = own.meet({{.to = to, .line = kLine}}, {}, Clock::now() + timeout);
    return "";
  } catch (const comm::CommError& error) {
    return error.what();
  }
}

/// A rank in slow motion: knows the secret, but another line, or says what others said before.
struct SlowRank {
  Stranger socket;
  Greeting greeting;
  Nonce of_callee{};

  SlowRank(const comm::Endpoint& to, const ConnectionId& line) : socket(to, 0), greeting{line, comm::fresh_nonce()} {}

  /// Whether it was asked for a proof.
  bool greet() {
    socket.say(comm::greeting_bytes(greeting));
    return socket.hears(of_callee);
  }

  /// What the callee answers to a proof; nothing when it shows the caller out.
  std::optional<comm::Digest> prove(const comm::Digest& proof) {
    socket.say(proof);
    comm::Digest answer{};
    return socket.hears(answer) ? std::optional(answer) : std::nullopt;
  }
};

/// A callee in slow motion.
class SlowListener {
 public:
  explicit SlowListener(int port = 0) : socket_(::socket(AF_INET, SOCK_STREAM, 0)), endpoint_{"127.0.0.1", port} {
    const int yes = 1;
    ::setsockopt(socket_.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const place = reinterpret_cast<sockaddr*>(&address);
    if (::bind(socket_.fd(), place, size) != 0 || ::listen(socket_.fd(), 8) != 0) throw std::runtime_error("no port");
    ::getsockname(socket_.fd(), place, &size);
    endpoint_.port = ntohs(address.sin_port);
  }

  const comm::Endpoint& endpoint() const { return endpoint_; }

  /// Lets the next caller in, whatever it proves.
  void answer(const std::function<comm::Digest(const Greeting&, const Nonce&)>& proof) const {
    const comm::TcpSocket caller(::accept(socket_.fd(), nullptr, nullptr));
    std::array<std::byte, comm::kGreetingBytes> greeting{};
    ASSERT_EQ(caller.recv_all(greeting), 0);
    const Nonce nonce = comm::fresh_nonce();
    caller.send_all(nonce);
    comm::Digest of_caller{};
    ASSERT_EQ(caller.recv_all(of_caller), 0);
    const Greeting said = comm::read_greeting(greeting).value();
    EXPECT_EQ(of_caller, Handshake(kSecret, "").caller_proof(said, nonce));
    caller.send_all(proof(said, nonce));
  }

  /// Closes the connection of the next caller.
  void show_out() const { const comm::TcpSocket caller(::accept(socket_.fd(), nullptr, nullptr)); }

 private:
  comm::TcpSocket socket_;
  comm::Endpoint endpoint_;
};

TEST(Door, BothEndsProveThatTheyKnowTheSecret) {
  Host host;
  SlowRank rank(host.rendezvous.endpoint(), kLine);
  const Handshake handshake(kSecret, "");
  ASSERT_TRUE(rank.greet());
  EXPECT_EQ(rank.prove(handshake.caller_proof(rank.greeting, rank.of_callee)),
            handshake.callee_proof(rank.greeting, rank.of_callee));
  EXPECT_NE(host.guest(), nullptr);
}

TEST(Door, AProofIsWorthNothingASecondTime) {
  Host first, second;
  const Handshake handshake(kSecret, "");
  SlowRank rank(first.rendezvous.endpoint(), kLine), replayed(second.rendezvous.endpoint(), kLine);
  ASSERT_TRUE(rank.greet());
  const auto proof = handshake.caller_proof(rank.greeting, rank.of_callee);
  EXPECT_TRUE(rank.prove(proof));
  replayed.greeting = rank.greeting;
  ASSERT_TRUE(replayed.greet());
  EXPECT_FALSE(replayed.prove(proof));
  EXPECT_EQ(call(second.rendezvous.endpoint()), "");
  EXPECT_NE(second.guest(), nullptr);
}

TEST(Door, AProofCannotBeSentBack) {
  // Somebody without the secret takes a rank's call and passes it on to the rank's own rendezvous, or answers with its
  // proof.
  TcpPeers links(0, 2, "127.0.0.1", kSecret);
  const SlowListener mirror;
  auto connecting = std::async(std::launch::async, [&] { links.connect(mirror.endpoint(), mirror.endpoint(), 20s); });
  for (const std::uint8_t number : {0, 1}) {
    SlowRank reflected(links.endpoint(), {.number = number, .caller = 0, .callee = 1});
    EXPECT_FALSE(reflected.greet()) << "a rank lets itself in";
  }
  links.abort("enough");
  EXPECT_THROW(connecting.get(), comm::AbortedError);
  const Handshake handshake(kSecret, "");
  const Greeting greeting{kLine, comm::fresh_nonce()};
  const Nonce nonce = comm::fresh_nonce();
  EXPECT_NE(handshake.caller_proof(greeting, nonce), handshake.callee_proof(greeting, nonce));
}

TEST(Door, AnotherLineRankDirectionOrJobIsRefused) {
  Host host;
  for (const ConnectionId& line :
       {ConnectionId{.number = 1, .caller = 1, .callee = 0}, ConnectionId{.number = 0, .caller = 2, .callee = 0},
        ConnectionId{.number = 0, .caller = 1, .callee = 2}, ConnectionId{.number = 0, .caller = 0, .callee = 1}}) {
    EXPECT_FALSE(SlowRank(host.rendezvous.endpoint(), line).greet());
  }
  EXPECT_NE(call(host.rendezvous.endpoint(), 300ms, "another job"), "");
  EXPECT_EQ(call(host.rendezvous.endpoint()), "");
  EXPECT_NE(host.guest(), nullptr);
}

TEST(Door, WhoAnswersWithoutTheSecretIsAStranger) {
  const SlowListener listener;
  auto calling = std::async(std::launch::async, [&] { return call(listener.endpoint()); });
  listener.answer([](const Greeting& greeting, const Nonce& nonce) {
    return Handshake(std::string(32, 'x'), "").callee_proof(greeting, nonce);
  });
  EXPECT_EQ(calling.get(), "what listens where stage 0 at 127.0.0.1:" + std::to_string(listener.endpoint().port) +
                               " should is a stranger");
}

TEST(Door, ACallerWhoIsShownOutCallsAgain) {
  const SlowListener listener;
  auto calling = std::async(std::launch::async, [&] { return call(listener.endpoint()); });
  for (int i = 0; i < 3; ++i) listener.show_out();
  listener.answer([](const Greeting& greeting, const Nonce& nonce) {
    return Handshake(kSecret, "").callee_proof(greeting, nonce);
  });
  EXPECT_EQ(calling.get(), "");
}

TEST(Door, AFloodOfStrangersHoldsUpNobody) {
  constexpr int kStrangers = 200;
  TcpPeers first(0, 2, "127.0.0.1", kSecret), second(1, 2, "127.0.0.1", kSecret);
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < kStrangers; ++i) {  // silent, in the middle of a greeting, noisy; before anybody listens to them
    strangers.push_back(std::make_unique<Stranger>(first.endpoint(), i % 4 == 0 ? 100 : i % 2 * 9));
  }
  const auto start = Clock::now();
  std::thread other([&] { second.connect(first.endpoint(), first.endpoint(), 60s); });
  first.connect(second.endpoint(), second.endpoint(), 60s);
  other.join();
  EXPECT_LT(Clock::now() - start, 5s);
  for (const auto& stranger : strangers) EXPECT_TRUE(stranger->was_refused());
}

TEST(Door, StrangersWhoKeepComingHoldUpNobody) {
  Host host(60s);
  std::atomic<bool> enough = false;
  std::thread flood([&] {
    std::vector<std::unique_ptr<Stranger>> strangers;
    while (!enough) {
      if (strangers.size() == 300) strangers.clear();
      strangers.push_back(std::make_unique<Stranger>(host.rendezvous.endpoint(), 0));
    }
  });
  std::this_thread::sleep_for(200ms);
  const auto start = Clock::now();
  EXPECT_EQ(call(host.rendezvous.endpoint(), 30s), "");
  EXPECT_LT(Clock::now() - start, 10s);
  EXPECT_NE(host.guest(), nullptr);
  enough = true;
  flood.join();
}

/// How many more descriptors this process may have.
class FewDescriptors {
 public:
  explicit FewDescriptors(int more) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const int next = ::dup(0);  // the lowest free one
    ::close(next);
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(next + more);
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(Door, WithoutDescriptorsForStrangersItWaitsAndThenLetsTheRankIn) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "UBSan opens a pipe to see of what type an object is";
#endif
  TcpRendezvous rendezvous("127.0.0.1", job());
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 20; ++i) strangers.push_back(std::make_unique<Stranger>(rendezvous.endpoint(), 0));
  SlowRank rank(rendezvous.endpoint(), kLine);
  std::future<TcpRendezvous::Connections> meeting;
  double busy_seconds = 0.0;
  {
    const FewDescriptors none(0);
    meeting = std::async(std::launch::async, [&] {
      auto found = rendezvous.meet({}, {kLine}, Clock::now() + 20s);
      timespec busy{};
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &busy);
      busy_seconds = static_cast<double>(busy.tv_sec) + static_cast<double>(busy.tv_nsec) * 1e-9;
      return found;
    });
    std::this_thread::sleep_for(600ms);
  }
  const FewDescriptors three(3);  // fewer than strangers: the oldest must go
  ASSERT_TRUE(rank.greet());
  EXPECT_TRUE(rank.prove(Handshake(kSecret, "").caller_proof(rank.greeting, rank.of_callee)));
  EXPECT_NE(meeting.get().incoming.at(0), nullptr);
  EXPECT_LT(busy_seconds, 0.3) << "it asked again and again";
}

TEST(Door, ARefusedCallSaysSoAndWhereLongBeforeTheDeadline) {
  auto gone = std::make_unique<TcpRendezvous>("127.0.0.1", job());
  const comm::Endpoint endpoint = gone->endpoint();
  gone.reset();
  const auto start = Clock::now();
  EXPECT_EQ(call(endpoint, 60s),
            "could not connect to stage 0 at 127.0.0.1:" + std::to_string(endpoint.port) + ": Connection refused");
  EXPECT_LT(Clock::now() - start, 15s);
}

TEST(Door, ARefusalThatPassesIsNoError) {  // as of a network that needs a moment
  auto gone = std::make_unique<TcpRendezvous>("127.0.0.1", job());
  const comm::Endpoint endpoint = gone->endpoint();
  gone.reset();
  auto calling = std::async(std::launch::async, [&] { return call(endpoint); });
  std::this_thread::sleep_for(300ms);
  SlowListener(endpoint.port).answer([](const Greeting& greeting, const Nonce& nonce) {
    return Handshake(kSecret, "").callee_proof(greeting, nonce);
  });
  EXPECT_EQ(calling.get(), "");
}

TEST(Door, AbortEndsAMeetingUnderWayAndToCome) {
  TcpPeers links(0, 2, "127.0.0.1", kSecret), silent(1, 2, "127.0.0.1", kSecret);
  comm::TcpRingPeers ring(0, 2, "127.0.0.1", kSecret), quiet(1, 2, "127.0.0.1", kSecret);
  const auto start = Clock::now();
  const auto expect_abort = [](auto connect) {
    try {
      connect();
      FAIL() << "connected to nobody";
    } catch (const comm::AbortedError& error) {
      EXPECT_EQ(std::string(error.what()), "stage 1 broke");
    }
  };
  std::thread stage([&] { expect_abort([&] { links.connect(silent.endpoint(), silent.endpoint(), 60s); }); });
  std::thread replica([&] { expect_abort([&] { ring.connect(quiet.endpoint(), 60s); }); });
  std::this_thread::sleep_for(100ms);
  links.abort("stage 1 broke");
  ring.abort("stage 1 broke");
  stage.join();
  replica.join();
  silent.abort("stage 1 broke");
  quiet.abort("stage 1 broke");
  expect_abort([&] { silent.connect(links.endpoint(), links.endpoint(), 60s); });
  expect_abort([&] { quiet.connect(ring.endpoint(), 60s); });
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST(TcpRendezvous, ConnectionsBreakWithTheHostOfTheOtherEnd) {
  Host host(6s);
  ASSERT_EQ(call(host.rendezvous.endpoint()), "");
  const auto guest = host.guest();
  const auto option = [&](int level, int name) {
    int value = 0;
    socklen_t size = sizeof(value);
    return ::getsockopt(guest->fd(), level, name, &value, &size) == 0 ? value : -1;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_GT(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 1000);
  const int probing = option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT);
  EXPECT_LE(option(IPPROTO_TCP, TCP_KEEPIDLE) + probing, 6 + 1);
}

}  // namespace
}  // namespace fold3d::test
