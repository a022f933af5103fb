#include "core/network/network.h"

#include <algorithm>
#include <cmath>

namespace fold3d::core {

Network::Network(int num_hosts, const Options& options, EventQueue& events)
    : options_(options),
      rule_(options.rule),
      events_(events),
      out_(static_cast<std::size_t>(num_hosts)),
      in_(static_cast<std::size_t>(num_hosts)),
      accounts_(static_cast<std::size_t>(num_hosts)) {}

std::int64_t Network::duration(std::int64_t bytes, double bandwidth) {
  return std::llround(static_cast<double>(bytes) * 1e9 / bandwidth);
}

double Network::sent_until(int host, std::int64_t now) const {
  const Account& account = accounts_[static_cast<std::size_t>(host)];
  if (account.bytes == 0 || account.until <= account.since) return account.sent;
  const std::int64_t passed = std::clamp<std::int64_t>(now - account.since, 0, account.until - account.since);
  return account.sent + static_cast<double>(account.bytes) * static_cast<double>(passed) /
                            static_cast<double>(account.until - account.since);
}

void Network::on_its_way(int host, std::int64_t since, std::int64_t until, std::int64_t bytes) {
  Account& account = accounts_[static_cast<std::size_t>(host)];
  account = {account.sent, since, until, bytes};
}

void Network::has_left(int host, std::int64_t bytes) {
  Account& account = accounts_[static_cast<std::size_t>(host)];
  account = {account.sent + static_cast<double>(bytes)};
}

void Network::send_message(std::int64_t now, int from, int to, std::int64_t bytes, int token, double bandwidth) {
  const std::int64_t lasting = duration(bytes, bandwidth > 0 ? bandwidth : options_.bandwidth);
  messages_.push_back({from, to, token, bytes, lasting, now, 0});
  waiting_messages_.push_back(static_cast<int>(messages_.size()) - 1);
  for (Side* side : {&out(from), &in(to)}) {
    // Patience must outlast the slice that is on its way.
    side->pipeline.begins(now, lasting + duration(options_.slice_bytes));
    shorten(now, *side, true);
  }
  start_what_can(now);
}

void Network::start_flow(std::int64_t now, int from, int to, std::int64_t bytes, int priority, int token) {
  flows_.push_back({from, to, token, priority, bytes, now});
  wait_in_line(static_cast<int>(flows_.size()) - 1);
  for (const Side* side : {&out(from), &in(to)}) {
    if (side->flow >= 0 && flows_[static_cast<std::size_t>(side->flow)].priority >= priority) {
      shorten(now, *side, false);
    }
  }
  start_what_can(now);
}

bool Network::handle(const Event& event, Sent& sent) {
  bool something = false;
  if (event.type == Event::Type::kMessageSent) {
    const Message& message = messages_[static_cast<std::size_t>(event.a)];
    for (Side* side : {&out(message.from), &in(message.to)}) {
      side->busy = false;
      side->pipeline.ends();
    }
    sent = {message.from, message.to, true, message.token, message.started, event.time, message.bytes, true};
    counters_.message_bytes += message.bytes;
    has_left(message.from, message.bytes);
    something = true;
  } else if (event.type == Event::Type::kBurstSent) {
    Flow& flow = flows_[static_cast<std::size_t>(event.a)];
    if (event.b != flow.version) return false;  // shortened since
    for (Side* side : {&out(flow.from), &in(flow.to)}) *side = {false, -1, side->pipeline};
    flow.left -= flow.burst;
    sent = {flow.from, flow.to, false, flow.token, flow.started, event.time, flow.burst, flow.left == 0};
    counters_.flow_bytes += flow.burst;
    has_left(flow.from, flow.burst);
    flow.burst = 0;
    flow.ready = event.time;
    if (flow.left > 0) wait_in_line(event.a);
    something = true;
  }
  return something;
}

/// A flow's place is behind those of its priority that have waited longer: equals take turns.
void Network::wait_in_line(int flow) {
  const auto before = [this](int x, int y) {
    const Flow& first = flows_[static_cast<std::size_t>(x)];
    const Flow& second = flows_[static_cast<std::size_t>(y)];
    if (options_.preempt && first.priority != second.priority) return first.priority < second.priority;
    return first.ready < second.ready;
  };
  waiting_flows_.insert(std::upper_bound(waiting_flows_.begin(), waiting_flows_.end(), flow, before), flow);
}

void Network::start_what_can(std::int64_t now) {
  std::size_t message = 0;
  std::size_t flow = 0;
  while (message < waiting_messages_.size() || flow < waiting_flows_.size()) {
    bool message_first = message < waiting_messages_.size();
    if (message_first && !options_.preempt && flow < waiting_flows_.size()) {
      message_first = messages_[static_cast<std::size_t>(waiting_messages_[message])].queued <=
                      flows_[static_cast<std::size_t>(waiting_flows_[flow])].ready;
    }
    auto& line = message_first ? waiting_messages_ : waiting_flows_;
    auto& place = message_first ? message : flow;
    const int number = line[place];
    if (message_first ? start_message(now, number) : start_burst(now, number)) {
      line.erase(line.begin() + static_cast<std::ptrdiff_t>(place));
    } else {
      ++place;
    }
  }
}

bool Network::start_message(std::int64_t now, int number) {
  Message& message = messages_[static_cast<std::size_t>(number)];
  if (out(message.from).busy || in(message.to).busy) return false;
  out(message.from).busy = in(message.to).busy = true;
  message.started = now;
  const std::int64_t waited = now - message.queued;
  counters_.longest_wait_ns = std::max(counters_.longest_wait_ns, waited);
  counters_.total_wait_ns += waited;
  on_its_way(message.from, now, now + message.duration, message.bytes);
  events_.push(now + message.duration, Event::Type::kMessageSent, number);
  return true;
}

bool Network::start_burst(std::int64_t now, int number) {
  Flow& flow = flows_[static_cast<std::size_t>(number)];
  if (out(flow.from).busy || in(flow.to).busy) return false;
  const std::int64_t allowed = allowed_from(flow);
  if (options_.preempt && allowed > now) {
    // One wake-up under way is enough; it is handled before any later one would be.
    if (next_wake_ <= now || allowed < next_wake_) {
      next_wake_ = allowed;
      events_.push(allowed, Event::Type::kNetworkWake);
    }
    return false;
  }
  for (Side* side : {&out(flow.from), &in(flow.to)}) *side = {true, number, side->pipeline};
  flow.burst = options_.preempt ? std::min(flow.left, turn_of(flow)) : flow.left;
  flow.started = now;
  flow.until = now + duration(flow.burst);
  on_its_way(flow.from, now, flow.until, flow.burst);
  events_.push(flow.until, Event::Type::kBurstSent, number, ++flow.version);
  return true;
}

std::int64_t Network::allowed_from(const Flow& flow) const {
  std::int64_t allowed = flow.ready;
  for (const Side* side : {&out_[static_cast<std::size_t>(flow.from)], &in_[static_cast<std::size_t>(flow.to)]}) {
    allowed = std::max(allowed, rule_.start_ns(flow.ready, side->pipeline));
  }
  return allowed;
}

/// Bytes that a flow sends before another one may have its card: a slice where a message is about to come. With equals
/// it takes longer turns, since a turn is an event, and shorter ones towards its end: they end as if each were a slice.
std::int64_t Network::turn_of(const Flow& flow) const {
  const std::int64_t slice = options_.slice_bytes;
  if (out_[static_cast<std::size_t>(flow.from)].pipeline.pending > 0) return slice;
  if (in_[static_cast<std::size_t>(flow.to)].pipeline.pending > 0) return slice;
  const bool shares = std::any_of(waiting_flows_.begin(), waiting_flows_.end(), [&](int number) {
    const Flow& other = flows_[static_cast<std::size_t>(number)];
    return &other != &flow && other.priority <= flow.priority && (other.from == flow.from || other.to == flow.to);
  });
  return shares ? std::max<std::int64_t>(flow.left / kTurns / slice, 1) * slice : flow.left;
}

/// Ends the side's burst at the next slice border, if it has one left and may be paused.
void Network::shorten(std::int64_t now, const Side& side, bool for_message) {
  if (!options_.preempt || side.flow < 0) return;
  Flow& flow = flows_[static_cast<std::size_t>(side.flow)];
  auto slices = static_cast<std::int64_t>(static_cast<double>(now - flow.started) * options_.bandwidth / 1e9 /
                                          static_cast<double>(options_.slice_bytes));
  slices = std::max<std::int64_t>(flow.started == now ? 0 : 1, slices);  // what begins only now may be taken back
  while (slices * options_.slice_bytes < flow.burst && flow.started + duration(slices * options_.slice_bytes) < now) {
    ++slices;
  }
  if (slices * options_.slice_bytes >= flow.burst) return;
  if (for_message) ++counters_.preemptions;
  flow.burst = slices * options_.slice_bytes;
  flow.until = flow.started + duration(flow.burst);
  on_its_way(flow.from, flow.started, flow.until, flow.burst);
  events_.push(flow.until, Event::Type::kBurstSent, side.flow, ++flow.version);
}

}  // namespace fold3d::core
