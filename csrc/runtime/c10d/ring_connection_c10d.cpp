#include "runtime/c10d/ring_connection_c10d.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <stdexcept>
#include <vector>

#include "runtime/c10d/bytes_view.h"

namespace fold3d::runtime {

namespace {

constexpr int kRingTag = 0;  // one sender and one receiver on each connection of the ring: order alone pairs the pieces

}  // namespace

C10dRingConnection::C10dRingConnection(const std::string& group, int rank, int size)
    : group_(c10d::resolve_process_group(group)), next_((rank + 1) % size), previous_((rank + size - 1) % size) {
  if (group_->getRank() != rank || group_->getSize() != size) {
    throw std::invalid_argument("replica " + std::to_string(rank) + " of " + std::to_string(size) + " is rank " +
                                std::to_string(group_->getRank()) + " of " + std::to_string(group_->getSize()) +
                                " in the group of its stage");
  }
}

void C10dRingConnection::send(std::span<const std::byte> header, std::span<const std::byte> payload) {
  for (const auto piece : {header, payload}) {
    works_.check();
    std::vector<at::Tensor> tensors{bytes_view(piece.data(), piece.size())};
    works_.wait(group_->send(tensors, next_, kRingTag));
  }
}

void C10dRingConnection::recv(std::span<std::byte> bytes) {
  works_.check();
  std::vector<at::Tensor> tensors{bytes_view(bytes.data(), bytes.size())};
  works_.wait(group_->recv(tensors, previous_, kRingTag));
}

void C10dRingConnection::abort(const std::string& reason) noexcept { works_.abort(reason); }

}  // namespace fold3d::runtime
