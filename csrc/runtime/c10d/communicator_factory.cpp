#include "runtime/c10d/communicator_factory.h"

#include <utility>

#include "comm/arbiter/own_process.h"
#include "comm/tcp/transport_tcp.h"
#include "runtime/device/tensor_allocator.h"

namespace fold3d::runtime {

std::shared_ptr<comm::Communicator> make_communicator(const comm::Options& options, c10::Device device,
                                                      const GroupNames& groups, std::shared_ptr<comm::TcpPeers> peers,
                                                      std::shared_ptr<comm::NicArbiter> arbiter,
                                                      std::shared_ptr<comm::Landing> landing,
                                                      std::shared_ptr<StreamClock> clock) {
  std::unique_ptr<comm::Transport> transport;
  if (peers) {
    transport = std::make_unique<comm::TcpTransport>(std::move(peers));
  } else {
    std::unique_ptr<comm::MessageWatch> watch;  // of what takes the host's card, where the device sends by itself
    if (arbiter && options.makes_room && !device.is_cpu()) watch = std::make_unique<comm::MessageWatch>(arbiter);
    transport = std::make_unique<C10dTransport>(groups, device, std::move(clock), std::move(watch), options.hosts,
                                                options.stage, options.shape.pp);
  }
  return comm::make_for_process<comm::Communicator>(std::move(transport), options, std::move(arbiter),
                                                    std::make_unique<TensorAllocator>(device), std::move(landing));
}

}  // namespace fold3d::runtime
