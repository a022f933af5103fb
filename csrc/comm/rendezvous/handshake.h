#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "comm/rendezvous/sha256.h"

namespace fold3d::comm {

/// A connection between two ranks of a job: `caller` opens it to `callee`. `number` tells apart what travels over the
/// connections between the same two.
struct ConnectionId {
  std::uint8_t number = 0;
  std::int32_t caller = 0;
  std::int32_t callee = 0;

  bool operator==(const ConnectionId&) const = default;
};

using Nonce = std::array<std::byte, 32>;

/// Bytes that nobody can foresee. Throws CommError when the system has none.
Nonce fresh_nonce();

/// What a caller says first.
struct Greeting {
  ConnectionId line;
  Nonce nonce{};

  bool operator==(const Greeting&) const = default;
};

inline constexpr std::size_t kGreetingBytes = 8 + 1 + 4 + 4 + sizeof(Nonce);

std::array<std::byte, kGreetingBytes> greeting_bytes(const Greeting& greeting);
/// Nothing when these are not the bytes of a greeting.
std::optional<Greeting> read_greeting(std::span<const std::byte> bytes);

/// How two ranks prove to each other that they know the secret of the job, without telling it:
///   caller: greeting (line, nonce)      callee: a nonce of its own
///   caller: proof, bound to all of that callee: proof, bound to the same
/// Nonces are never used twice, so a proof is worth nothing on another connection; the roles' proofs differ, so it
/// cannot be sent back.
class Handshake {
 public:
  /// `secret`: at least 32 characters, all of which count. `job`: any text; both the same on all ranks. Throws
  /// CommError for a shorter one.
  Handshake(std::string secret, std::string job);

  Digest caller_proof(const Greeting& greeting, const Nonce& of_callee) const;
  Digest callee_proof(const Greeting& greeting, const Nonce& of_callee) const;

 private:
  Digest proof(std::string role, const Greeting& greeting, const Nonce& of_callee) const;

  const std::string secret_;
  const std::string job_;
};

}  // namespace fold3d::comm
