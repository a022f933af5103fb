#pragma once

namespace fold3d::comm {

/// Forked children, such as the workers of a data loader, do not keep these descriptors: a connection whose owner was
/// killed would stay open as long as they live, and the peer would wait. In a child the number stays taken, so that
/// nothing it opens is mistaken for what the parent's objects knew under this number. A program that a child executes
/// has none of them either way (SOCK_CLOEXEC). Thread-safe.
void keep_from_children(int fd);

/// Closes such a descriptor.
void close_guarded(int fd);

}  // namespace fold3d::comm
