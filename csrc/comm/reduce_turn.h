#pragma once

#include <cstddef>

#include "comm/host_gate.h"

namespace fold3d::comm {

/// As long as this lives, a reduce-scatter wants to send: gathers of the host yield to it. Nothing for a gather.
class ReduceTurn {
 public:
  ReduceTurn(HostGate& gate, HostGate::Traffic traffic, std::size_t bytes)
      : gate_(traffic == HostGate::Traffic::kReduce ? &gate : nullptr) {
    if (gate_) gate_->reduce_begins(bytes);
  }
  ~ReduceTurn() {
    if (gate_) gate_->reduce_ends();
  }
  ReduceTurn(const ReduceTurn&) = delete;
  ReduceTurn& operator=(const ReduceTurn&) = delete;

 private:
  HostGate* const gate_;
};

}  // namespace fold3d::comm
