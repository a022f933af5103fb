// The handshake of two ranks: published vectors of its digests, and everything that a proof is bound to.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "comm/base/errors.h"
#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/sha256.h"

namespace fold3d::test {
namespace {

using comm::Digest;
using comm::Greeting;
using comm::Handshake;
using comm::Nonce;

const std::string kSecret(64, 's');

std::vector<std::byte> bytes(const std::string& text) {
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

std::string hex(const Digest& digest) {
  static const char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : digest) {
    text += kDigits[std::to_integer<unsigned>(byte) >> 4];
    text += kDigits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

TEST(Sha256, TheExamplesOfTheStandard) {  // FIPS 180-4, as NIST publishes them
  EXPECT_EQ(hex(comm::sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(comm::sha256(bytes("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(comm::sha256(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(comm::sha256(bytes(std::string(1'000'000, 'a')))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, TheExamplesOfHmac) {  // RFC 4231, test cases 1, 2, 3, 6 and 7
  const auto hmac = [](const std::string& key, const std::string& text) {
    return hex(comm::hmac_sha256(bytes(key), bytes(text)));
  };
  EXPECT_EQ(hmac(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(
      hmac(std::string(131, '\xaa'),
           "This is a test using a larger than block-size key and a larger than block-size data. The key needs to "
           "be hashed before being used by the HMAC algorithm."),
      "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Sha256, DigestsDifferInAnyBit) {
  const Digest digest = comm::sha256({});
  EXPECT_TRUE(comm::same_digest(digest, digest));
  for (std::size_t i = 0; i < digest.size(); ++i) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      Digest other = digest;
      other[i] ^= static_cast<std::byte>(1u << bit);
      EXPECT_FALSE(comm::same_digest(digest, other));
    }
  }
}

TEST(Handshake, AGreetingIsReadAsItWasWritten) {
  const Greeting greeting{.line = {.number = 3, .caller = 4095, .callee = -7}, .nonce = comm::fresh_nonce()};
  const auto bytes = comm::greeting_bytes(greeting);
  EXPECT_EQ(comm::read_greeting(bytes), greeting);
  EXPECT_FALSE(comm::read_greeting(std::span(bytes).first(bytes.size() - 1)));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    auto damaged = bytes;
    damaged[i] ^= std::byte{1};
    EXPECT_NE(comm::read_greeting(damaged), greeting) << i;
  }
}

TEST(Handshake, NoncesAreFresh) {
  std::set<Nonce> seen;
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(seen.insert(comm::fresh_nonce()).second);
}

TEST(Handshake, AProofIsBoundToAllThatBothKnow) {
  const Greeting greeting{.line = {.number = 1, .caller = 2, .callee = 3}, .nonce = comm::fresh_nonce()};
  const Nonce of_callee = comm::fresh_nonce();
  const Handshake handshake(kSecret, "job");
  std::vector<Digest> all{handshake.caller_proof(greeting, of_callee), handshake.callee_proof(greeting, of_callee)};
  const auto with = [&](auto change) {
    Greeting other = greeting;
    change(other);
    all.push_back(handshake.caller_proof(other, of_callee));
  };
  with([](Greeting& g) { g.line.number = 0; });
  with([](Greeting& g) { g.line.caller = 4; });
  with([](Greeting& g) { g.line.callee = 4; });
  with([](Greeting& g) { std::swap(g.line.caller, g.line.callee); });
  with([](Greeting& g) { g.nonce = comm::fresh_nonce(); });
  all.push_back(handshake.caller_proof(greeting, comm::fresh_nonce()));
  all.push_back(Handshake(kSecret, "another job").caller_proof(greeting, of_callee));
  for (std::size_t i = 0; i < kSecret.size(); ++i) {  // every character of the secret counts
    std::string other = kSecret;
    other[i] = 't';
    all.push_back(Handshake(other, "job").caller_proof(greeting, of_callee));
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(std::count(all.begin(), all.end(), all[i]), 1) << i;
  }
}

TEST(Handshake, AShortSecretIsRefused) { EXPECT_THROW(Handshake(std::string(31, 's'), ""), comm::CommError); }

}  // namespace
}  // namespace fold3d::test
