#include "comm/rendezvous/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

constexpr std::array<char, 8> kMagic{'f', 'o', 'l', 'd', '3', 'd', 't', '2'};
constexpr std::size_t kLeastSecretBytes = 32;

/// Little-endian, whatever the machine.
template <class Bytes>
Bytes* put_int(Bytes* place, std::int32_t value) {
  for (int shift = 0; shift < 32; shift += 8)
    *place++ = static_cast<std::byte>(static_cast<std::uint32_t>(value) >> shift);
  return place;
}

std::int32_t get_int(const std::byte* place) {
  std::uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | std::to_integer<std::uint32_t>(place[i]);
  return static_cast<std::int32_t>(value);
}

}  // namespace

Nonce fresh_nonce() {
  Nonce nonce;
  for (;;) {
    const ssize_t got = ::getrandom(nonce.data(), nonce.size(), 0);
    if (got == static_cast<ssize_t>(nonce.size())) return nonce;
    if (got < 0 && errno != EINTR)
      throw CommError(std::string("the system gives no random bytes: ") + std::strerror(errno));
  }
}

std::array<std::byte, kGreetingBytes> greeting_bytes(const Greeting& greeting) {
  std::array<std::byte, kGreetingBytes> bytes{};
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  std::byte* place = bytes.data() + kMagic.size();
  *place++ = static_cast<std::byte>(greeting.line.number);
  place = put_int(place, greeting.line.caller);
  place = put_int(place, greeting.line.callee);
  std::copy(greeting.nonce.begin(), greeting.nonce.end(), place);
  return bytes;
}

std::optional<Greeting> read_greeting(std::span<const std::byte> bytes) {
  if (bytes.size() != kGreetingBytes || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0)
    return std::nullopt;
  const std::byte* const place = bytes.data() + kMagic.size();
  Greeting greeting{.line = {.number = std::to_integer<std::uint8_t>(*place),
                             .caller = get_int(place + 1),
                             .callee = get_int(place + 5)}};
  const auto nonce = bytes.last(greeting.nonce.size());
  std::copy(nonce.begin(), nonce.end(), greeting.nonce.begin());
  return greeting;
}

Handshake::Handshake(std::string secret, std::string job) : secret_(std::move(secret)), job_(std::move(job)) {
  if (secret_.size() < kLeastSecretBytes) {
    throw CommError("the secret of the links has " + std::to_string(secret_.size()) +
                    " characters; it needs at least " + std::to_string(kLeastSecretBytes));
  }
}

Digest Handshake::caller_proof(const Greeting& greeting, const Nonce& of_callee) const {
  return proof("caller", greeting, of_callee);
}

Digest Handshake::callee_proof(const Greeting& greeting, const Nonce& of_callee) const {
  return proof("callee", greeting, of_callee);
}

Digest Handshake::proof(std::string role, const Greeting& greeting, const Nonce& of_callee) const {
  std::vector<std::byte> message;
  const auto add = [&message](std::span<const std::byte> bytes) {
    message.insert(message.end(), bytes.begin(), bytes.end());
  };
  // All but the last have a fixed length, so no two handshakes make the same message.
  add(std::as_bytes(std::span(role)));
  add(greeting_bytes(greeting));
  add(of_callee);
  add(std::as_bytes(std::span(job_)));
  return hmac_sha256(std::as_bytes(std::span(secret_)), message);
}

}  // namespace fold3d::comm
