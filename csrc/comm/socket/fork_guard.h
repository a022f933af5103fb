#pragma once

#include <cstdint>

namespace fold3d::comm {

/// Forked children, such as the workers of a data loader, do not keep these descriptors: a connection whose owner was
/// killed would stay open as long as they live, and the peer would wait. In a child the number stays taken, so that
/// nothing it opens is mistaken for what the parent's objects knew under this number. A program that a child executes
/// has none of them either way (SOCK_CLOEXEC). Thread-safe.
void keep_from_children(int fd);

/// Closes such a descriptor.
void close_guarded(int fd);

/// As keep_from_children(), for a socket of a library, which closes it whenever it likes: a child gives it up only if
/// the descriptor is still the socket with this `inode`.
void keep_from_children(int fd, std::uint64_t inode);

}  // namespace fold3d::comm
