#pragma once

#include <cstddef>
#include <string>

namespace fold3d::comm {

/// Memory that starts as zeros and ends with its last user: this process's own, or, under a name, that of all
/// processes of this user and host that give the name. It is created by whoever comes first; zeros are the only
/// state nobody has to wait for, so no creator is awaited.
class SharedMemory {
 public:
  /// `name`: without slashes; empty: this process's own. Throws CommError when the system refuses, when the name
  /// belongs to another user, or when memory of another size has it.
  SharedMemory(const std::string& name, std::size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }

  /// Takes the name away, so that the memory ends with those who have it now. Idempotent; nothing to do without a
  /// name.
  void unlink() noexcept;

 private:
  const std::string path_;  // empty: no name
  const std::size_t bytes_;
  void* data_;
};

}  // namespace fold3d::comm
