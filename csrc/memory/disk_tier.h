#pragma once

#include <memory>
#include <string>

#include "memory/slot/tier.h"

namespace fold3d::memory {

/// A file without a name in a folder, past the page cache (O_DIRECT) where the file system can do that: for hosts whose
/// memory is short. Its blocks are reserved before anything is written, so that a full disk is found at once.
class DiskTier final : public Tier {
 public:
  /// Throws PoolError if `folder` cannot be written to, or has no room.
  DiskTier(std::size_t bytes, const std::string& folder);
  ~DiskTier() override;
  DiskTier(const DiskTier&) = delete;
  DiskTier& operator=(const DiskTier&) = delete;

  std::size_t bytes() const override { return bytes_; }
  std::byte* data() override { return nullptr; }
  void write(std::size_t begin, const Pieces& pieces) override;
  void read(std::size_t begin, const Pieces& pieces) override;

 private:
  using Block = std::shared_ptr<std::byte>;  // aligned, kBlock bytes
  static constexpr std::size_t kBlock = std::size_t{4} << 20;

  std::size_t bytes_;
  std::string folder_;
  int file_ = -1;
  Block out_, in_;  // of write() and of read()
};

}  // namespace fold3d::memory
