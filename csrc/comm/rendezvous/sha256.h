#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace fold3d::comm {

using Digest = std::array<std::byte, 32>;

/// SHA-256 (FIPS 180-4).
Digest sha256(std::span<const std::byte> message);

/// HMAC-SHA256 (RFC 2104): only who knows `key` can make it, and it tells nothing of the key.
Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);

/// Whether two digests are the same, in a time that does not tell where they differ.
bool same_digest(const Digest& a, const Digest& b);

}  // namespace fold3d::comm
