#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "comm/arbiter/nic_arbiter.h"
#include "comm/p2p/communicator.h"
#include "comm/tcp/tcp_peers.h"
#include "runtime/c10d/transport_c10d.h"

namespace fold3d::runtime {

/// The communicator of one stage for tensors on `device`: over `peers`, or over the groups where there are none. A new
/// transport is chosen here and nowhere else. `landing`: null: nothing lands in host memory. `clock`: of the device.
std::shared_ptr<comm::Communicator> make_communicator(const comm::Options& options, c10::Device device,
                                                      const GroupNames& groups, std::shared_ptr<comm::TcpPeers> peers,
                                                      std::shared_ptr<comm::NicArbiter> arbiter,
                                                      std::shared_ptr<comm::Landing> landing,
                                                      std::shared_ptr<StreamClock> clock);

}  // namespace fold3d::runtime
