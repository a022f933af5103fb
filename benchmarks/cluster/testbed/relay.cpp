// relay PARENT DELAY_US JITTER_US PORT...: a switch whose frames arrive DELAY_US later, in order.
//
// PORT is an interface of the network namespace that it runs in. The time to the next frame's place varies evenly by up
// to JITTER_US each way, and stays for kJitterPeriod: a queue elsewhere grows and shrinks, it does not shuffle frames.
// Frames come and go with the kernel's offload header: what TCP hands over in one piece costs one read and one write.
#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t kJitterPeriod = 10'000'000;       // ns
constexpr int kBufferBytes = 64 << 20;              // of a socket each way: more than a link's queue
constexpr std::size_t kHeader = 10;                 // of virtio_net_hdr, whose file is no C++
constexpr std::size_t kLargest = kHeader + 70'000;  // of a frame
constexpr int kAtOnce = 64;                         // frames of a port before the others have their turn

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "relay: %s: %s\n", what.c_str(), std::strerror(errno));
  std::exit(1);
}

struct Frame {
  int64_t due;
  std::vector<char> bytes;  // header and frame
};

struct Port {
  int socket;
  std::deque<Frame> waiting;  // by time; what leaves by this port
  int64_t jitter = 0, redraw = 0;
};

template <typename T>
void set(int socket, int level, int option, const T& value, const char* name) {
  if (setsockopt(socket, level, option, &value, sizeof value) != 0) fail(name);
}

int open_port(const char* name) {
  const int index = static_cast<int>(if_nametoindex(name));
  if (index == 0) fail(std::string("interface ") + name);
  const int opened = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);  // hears nothing before bind
  if (opened < 0) fail("socket");
  set(opened, SOL_SOCKET, SO_RCVBUFFORCE, kBufferBytes, "SO_RCVBUFFORCE");
  set(opened, SOL_SOCKET, SO_SNDBUFFORCE, kBufferBytes, "SO_SNDBUFFORCE");
  set(opened, SOL_PACKET, PACKET_VNET_HDR, 1, "PACKET_VNET_HDR");
  set(opened, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1, "PACKET_IGNORE_OUTGOING");
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(ETH_P_ALL);
  address.sll_ifindex = index;
  if (bind(opened, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fail("bind");
  return opened;
}

class Switch {
 public:
  Switch(int64_t delay_ns, int64_t jitter_ns, const std::vector<const char*>& names)
      : delay_(delay_ns), spread_(-jitter_ns, jitter_ns) {
    for (const char* name : names) ports_.push_back({open_port(name), {}});
  }

  [[noreturn]] void run() {
    std::vector<pollfd> readable;
    for (const Port& port : ports_) readable.push_back({port.socket, POLLIN, 0});
    for (;;) {
      const int64_t wait = std::max<int64_t>(0, send_due() - now());
      const timespec timeout{wait / 1'000'000'000, wait % 1'000'000'000};
      if (ppoll(readable.data(), readable.size(), &timeout, nullptr) < 0 && errno != EINTR) fail("ppoll");
      for (std::size_t port = 0; port < ports_.size(); ++port) receive(port);
    }
  }

 private:
  /// Sends what is due; returns when the next frame is, within a second.
  int64_t send_due() {
    int64_t next = now() + 1'000'000'000;
    for (Port& port : ports_) {
      while (!port.waiting.empty() && port.waiting.front().due <= now()) {
        const std::vector<char>& bytes = port.waiting.front().bytes;
        // A full queue drops the frame, as a switch does: TCP sends it again.
        (void)!send(port.socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
        port.waiting.pop_front();
      }
      if (!port.waiting.empty()) next = std::min(next, port.waiting.front().due);
    }
    return next;
  }

  void receive(std::size_t from) {
    for (int count = 0; count < kAtOnce; ++count) {
      const ssize_t size = recv(ports_[from].socket, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
      if (size < static_cast<ssize_t>(kHeader + ETH_HLEN)) return;
      const auto* frame = reinterpret_cast<const ethhdr*>(buffer_.data() + kHeader);
      behind_[address(frame->h_source)] = from;
      const auto known = behind_.find(address(frame->h_dest));
      for (std::size_t to = 0; to < ports_.size(); ++to)
        if (to != from && (known == behind_.end() || known->second == to)) queue(ports_[to], size);
    }
  }

  void queue(Port& port, ssize_t size) {
    const int64_t time = now();
    if (time >= port.redraw) port.jitter = spread_(random_), port.redraw = time + kJitterPeriod;
    const int64_t earliest = port.waiting.empty() ? 0 : port.waiting.back().due;
    port.waiting.push_back(
        {std::max(earliest, time + delay_ + port.jitter), {buffer_.begin(), buffer_.begin() + size}});
  }

  static uint64_t address(const unsigned char* bytes) {
    uint64_t number = 0;
    std::memcpy(&number, bytes, ETH_ALEN);
    return number;
  }

  int64_t delay_;
  std::uniform_int_distribution<int64_t> spread_;
  std::mt19937_64 random_{0};
  std::vector<Port> ports_;
  std::map<uint64_t, std::size_t> behind_;  // port by hardware address
  std::vector<char> buffer_ = std::vector<char>(kLargest);
};

}  // namespace

int main(int count, char** words) {
  if (count < 5) return std::fputs("usage: relay PARENT DELAY_US JITTER_US PORT...\n", stderr), 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != std::atoi(words[1])) return 1;  // it ended before the line above
  prctl(PR_SET_TIMERSLACK, 1);
  const sched_param priority{1};
  sched_setscheduler(0, SCHED_RR,
                     &priority);  // a network waits for no core; where that is refused, it is late at times
  Switch relay(std::atoll(words[2]) * 1000, std::atoll(words[3]) * 1000, {words + 4, words + count});
  std::puts("ready");
  std::fflush(stdout);
  relay.run();
}
