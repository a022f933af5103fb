#pragma once

#include <functional>
#include <memory>

#include "memory/slot/tier.h"

namespace fold3d::memory {

/// Reserves so many bytes of host memory and returns them with what gives them back: how memory is pinned is not this
/// room's matter. Throws when there is none.
using ReserveHost = std::function<std::shared_ptr<std::byte>(std::size_t)>;

/// Pages of the operating system, all of them there at once.
std::shared_ptr<std::byte> reserve_pages(std::size_t bytes);

/// Host memory.
class HostTier final : public Tier {
 public:
  /// Throws PoolError if the host has less memory than that available, or `reserve` fails.
  explicit HostTier(std::size_t bytes, const ReserveHost& reserve = reserve_pages);

  std::size_t bytes() const override { return bytes_; }
  std::byte* data() override { return memory_.get(); }
  void write(std::size_t begin, const Pieces& pieces) override;
  void read(std::size_t begin, const Pieces& pieces) override;

 private:
  std::size_t bytes_;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace fold3d::memory
