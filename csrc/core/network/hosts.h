#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace fold3d::core {

/// The host of every rank, stage or replica, as numbers that only tell hosts apart; empty: a host for each. Those of a
/// host share its network card.
using Hosts = std::vector<int>;

/// Throws std::invalid_argument, on behalf of `who`, when there are some but not `size`.
inline void check_hosts(const Hosts& hosts, int size, const std::string& who) {
  if (hosts.empty() || hosts.size() == static_cast<std::size_t>(size)) return;
  throw std::invalid_argument(who + ": hosts has " + std::to_string(hosts.size()) + " numbers; it must have " +
                              std::to_string(size) + ", or none");
}

inline int host_of(const Hosts& hosts, int rank) {
  return hosts.empty() ? rank : hosts[static_cast<std::size_t>(rank)];
}

/// Whether what one sends to the other goes through the cards of their hosts. What stays within a host does not: no
/// gradients are held back for it, and it is not held back itself. The runtime and the simulator both ask this.
inline bool uses_card(const Hosts& hosts, int from, int to) { return host_of(hosts, from) != host_of(hosts, to); }

}  // namespace fold3d::core
