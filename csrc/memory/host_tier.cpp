#include "memory/host_tier.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "memory/host_memory.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {
namespace {

std::shared_ptr<std::byte> reserved(std::size_t bytes, const ReserveHost& reserve) {
  const auto wanted = static_cast<std::int64_t>(bytes);
  const std::int64_t available = available_host_bytes();
  if (wanted > available) {
    throw PoolError("a pool of " + size_text(wanted) + " for offloaded activations is more than the " +
                    size_text(available) +
                    " of memory that the host has left: lower offload_pool, offload less (setting offload), or set "
                    "offload_disk to a folder of a fast disk");
  }
  try {
    return reserve(bytes);
  } catch (const std::exception& error) {
    throw PoolError("reserving a pool of " + size_text(wanted) +
                    " of host memory for offloaded activations failed: " + error.what() +
                    "; lower offload_pool, raise the limit of locked memory (ulimit -l), or set offload_disk");
  }
}

}  // namespace

std::shared_ptr<std::byte> reserve_pages(std::size_t bytes) {
  // Else the same memory would be available to the next who reserves.
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) throw PoolError(std::string("mmap: ") + std::strerror(errno));
  return {static_cast<std::byte*>(memory), [bytes](std::byte* pages) { ::munmap(pages, bytes); }};
}

HostTier::HostTier(std::size_t bytes, const ReserveHost& reserve) : bytes_(bytes), memory_(reserved(bytes, reserve)) {}

void HostTier::write(std::size_t begin, const Pieces& pieces) {
  for (const Piece& piece : pieces) std::memcpy(memory_.get() + begin + piece.offset, piece.data, piece.bytes);
}

void HostTier::read(std::size_t begin, const Pieces& pieces) {
  for (const Piece& piece : pieces) std::memcpy(piece.data, memory_.get() + begin + piece.offset, piece.bytes);
}

}  // namespace fold3d::memory
