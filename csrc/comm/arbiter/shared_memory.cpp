#include "comm/arbiter/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw CommError("shared memory " + path + ": " + why);
}

/// The descriptor of the memory; its size is right.
class Descriptor {
 public:
  Descriptor(const std::string& path, std::size_t bytes)
      : fd_(::shm_open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR)) {
    if (fd_ < 0) refuse(path, std::strerror(errno));
    try {
      check(path, bytes);
    } catch (...) {
      ::close(fd_);
      throw;
    }
  }
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  void check(const std::string& path, std::size_t bytes) const {
    struct stat status{};
    if (::fstat(fd_, &status) != 0) refuse(path, std::strerror(errno));
    if (status.st_uid != ::geteuid()) refuse(path, "belongs to another user");
    if (status.st_size == 0) {
      // Several may do this at once: all ask for the same size. Unlike ftruncate() it fails here when there is no
      // memory, not with a signal at the first use.
      const int error = ::posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
      if (error != 0) refuse(path, std::strerror(error));
      if (::fstat(fd_, &status) != 0) refuse(path, std::strerror(errno));
    }
    if (status.st_size != static_cast<off_t>(bytes)) {
      refuse(path, "has " + std::to_string(status.st_size) + " bytes, not " + std::to_string(bytes) +
                       "; run the same version of fold3d on every rank");
    }
  }

  const int fd_;
};

void* map(const std::string& path, std::size_t bytes) {
  void* data = MAP_FAILED;
  if (path.empty()) {
    data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  } else {
    const Descriptor descriptor(path, bytes);
    data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  }
  if (data == MAP_FAILED) refuse(path, std::strerror(errno));
  return data;
}

}  // namespace

SharedMemory::SharedMemory(const std::string& name, std::size_t bytes)
    : path_(name.empty() ? "" : "/" + name), bytes_(bytes), data_(map(path_, bytes)) {}

SharedMemory::~SharedMemory() { ::munmap(data_, bytes_); }

void SharedMemory::unlink() noexcept {
  if (!path_.empty()) ::shm_unlink(path_.c_str());
}

}  // namespace fold3d::comm
