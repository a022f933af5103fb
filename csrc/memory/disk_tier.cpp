#include "memory/disk_tier.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "memory/host_memory.h"
#include "memory/slot/tier.h"

namespace fold3d::memory {
namespace {

std::string free_space(const std::string& folder) {
  struct statvfs about{};
  if (::statvfs(folder.c_str(), &about) != 0) return "";
  return ", which has " + size_text(static_cast<std::int64_t>(about.f_bavail * about.f_frsize)) + " free";
}

[[noreturn]] void fail(const std::string& folder, const std::string& what, int error) {
  throw PoolError("offload_disk=" + folder + ": " + what + ": " + std::strerror(error) +
                  "; free space there, name another folder, lower offload_pool, or offload less (setting offload)");
}

/// A file of the folder that only this process sees; its name, if it ever had one, is gone when this returns. Below 0:
/// errno says why.
int open_nameless(const std::string& folder, int flags) {
  const int nameless = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, S_IRUSR | S_IWUSR);
  if (nameless >= 0) return nameless;
  // Some file systems only know files with names. Whatever else was wrong is wrong with these, too.
  std::string path = folder + "/fold3d-offload-XXXXXX";
  const int file = ::mkostemp(path.data(), O_CLOEXEC | flags);
  const int error = errno;
  ::unlink(path.c_str());  // also without a descriptor: who refuses O_DIRECT may have made it all the same
  errno = error;
  return file;
}

std::shared_ptr<std::byte> aligned_block(std::size_t bytes) {
  void* const memory = std::aligned_alloc(Tier::kAlignment, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [](std::byte* block) { std::free(block); }};
}

}  // namespace

DiskTier::DiskTier(std::size_t bytes, const std::string& folder)
    : bytes_(bytes), folder_(folder), out_(aligned_block(kBlock)), in_(aligned_block(kBlock)) {
  file_ = open_nameless(folder, O_DIRECT);
  if (file_ < 0 && errno == EINVAL) file_ = open_nameless(folder, 0);  // a file system without it
  if (file_ < 0) fail(folder, "no file can be made there", errno);
  if (const int error = ::posix_fallocate(file_, 0, static_cast<off_t>(bytes)); error != 0) {
    const std::string free = free_space(folder);
    ::close(file_);
    fail(folder, "no room for a pool of " + size_text(static_cast<std::int64_t>(bytes)) + free, error);
  }
}

DiskTier::~DiskTier() { ::close(file_); }

void DiskTier::write(std::size_t begin, const Pieces& pieces) {
  const std::size_t end = pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes;
  std::size_t next = 0;  // of pieces: the first that reaches into the block or beyond
  for (std::size_t at = 0; at < end; at += kBlock) {
    const std::size_t stop = std::min(end, at + kBlock);
    for (std::size_t k = next; k < pieces.size() && pieces[k].offset < stop; ++k) {
      const Piece& piece = pieces[k];
      const std::size_t from = std::max(at, piece.offset);
      const std::size_t to = std::min(stop, piece.offset + piece.bytes);
      if (from < to) std::memcpy(out_.get() + (from - at), piece.data + (from - piece.offset), to - from);
      if (piece.offset + piece.bytes <= stop) next = k + 1;
    }
    const std::size_t size = (stop - at + kAlignment - 1) / kAlignment * kAlignment;
    for (std::size_t done = 0; done < size;) {
      const ssize_t n = ::pwrite(file_, out_.get() + done, size - done, static_cast<off_t>(begin + at + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail(folder_, "writing failed", n == 0 ? EIO : errno);
      done += static_cast<std::size_t>(n);
    }
  }
}

void DiskTier::read(std::size_t begin, const Pieces& pieces) {
  const std::size_t end = pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes;
  std::size_t next = 0;
  for (std::size_t at = 0; at < end; at += kBlock) {
    const std::size_t stop = std::min(end, at + kBlock);
    const std::size_t size = (stop - at + kAlignment - 1) / kAlignment * kAlignment;
    for (std::size_t done = 0; done < size;) {
      const ssize_t n = ::pread(file_, in_.get() + done, size - done, static_cast<off_t>(begin + at + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail(folder_, "reading failed", n == 0 ? EIO : errno);
      done += static_cast<std::size_t>(n);
    }
    for (std::size_t k = next; k < pieces.size() && pieces[k].offset < stop; ++k) {
      const Piece& piece = pieces[k];
      const std::size_t from = std::max(at, piece.offset);
      const std::size_t to = std::min(stop, piece.offset + piece.bytes);
      if (from < to) std::memcpy(piece.data + (from - piece.offset), in_.get() + (from - at), to - from);
      if (piece.offset + piece.bytes <= stop) next = k + 1;
    }
  }
}

}  // namespace fold3d::memory
