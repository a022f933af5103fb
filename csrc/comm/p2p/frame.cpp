#include "comm/p2p/frame.h"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "comm/base/errors.h"

namespace fold3d::comm {
namespace {

constexpr std::uint32_t kMagic = 0x46334431;  // "F3D1"; reads differently on a machine of the other byte order
constexpr std::uint16_t kVersion = 4;

struct Prefix {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint8_t kind;
  std::uint8_t is_inline;
  std::uint16_t num_tensors;
  std::uint16_t used_bytes;
  std::int32_t chunk;
  std::int32_t micro_batch;
  std::uint32_t step;
  std::uint64_t payload_bytes;
};
static_assert(sizeof(Prefix) == kFramePrefixBytes);
static_assert(kFrameBytes <= std::numeric_limits<decltype(Prefix::used_bytes)>::max());

struct TensorPrefix {
  std::uint8_t dtype;
  std::uint8_t element_bytes;
  std::uint8_t requires_grad;
  std::uint8_t dimensions;
};

/// Walks over a frame from front to back and never past its end.
template <class Bytes>
class Cursor {
 public:
  explicit Cursor(Bytes frame) : rest_(frame) {}

  /// The next `count` bytes; an empty span and false when there are not as many.
  bool take(std::size_t count, Bytes& out) {
    if (count > rest_.size()) return false;
    out = rest_.first(count);
    rest_ = rest_.subspan(count);
    return true;
  }

  std::size_t left() const { return rest_.size(); }

 private:
  Bytes rest_;
};

using Writer = Cursor<std::span<std::byte>>;
using Reader = Cursor<std::span<const std::byte>>;

template <class Value>
void put(Writer& writer, const Value& value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  std::span<std::byte> place;
  if (!writer.take(sizeof(Value), place)) {
    throw std::invalid_argument(
        "the tensors that leave a chunk need more than a frame of " + std::to_string(kFrameBytes) +
        " bytes for their shapes; let fewer tensors cross the boundary, or cut the model elsewhere");
  }
  std::memcpy(place.data(), &value, sizeof(Value));
}

template <class Value>
Value get(Reader& reader) {
  static_assert(std::is_trivially_copyable_v<Value>);
  std::span<const std::byte> place;
  if (!reader.take(sizeof(Value), place)) throw ProtocolError("the header is longer than its frame");
  Value value;
  std::memcpy(&value, place.data(), sizeof(Value));
  return value;
}

std::size_t checked_bytes(const Tensor& tensor) {
  const std::size_t bytes = tensor.desc.bytes();
  if (!tensor.buffer) throw std::invalid_argument("a tensor to send has no buffer");
  if (tensor.buffer->bytes() != bytes) {
    throw std::invalid_argument("a tensor to send has a buffer of " + std::to_string(tensor.buffer->bytes()) +
                                " bytes, but its shape and element size say " + std::to_string(bytes));
  }
  return bytes;
}

Prefix read_prefix(Reader& reader) {
  const auto prefix = get<Prefix>(reader);
  if (prefix.magic != kMagic) throw ProtocolError("the bytes that arrived are not the header of a message (bad magic)");
  if (prefix.version != kVersion) {
    throw ProtocolError("the message has format version " + std::to_string(prefix.version) +
                        ", this rank reads version " + std::to_string(kVersion) +
                        "; run the same version of fold3d on every rank");
  }
  if (prefix.used_bytes < kFramePrefixBytes || prefix.used_bytes > kFrameBytes) {
    throw ProtocolError("the header announces a frame of " + std::to_string(prefix.used_bytes) +
                        " bytes; a frame has " + std::to_string(kFramePrefixBytes) + " to " +
                        std::to_string(kFrameBytes));
  }
  return prefix;
}

void check_field(const char* name, std::uint64_t value, std::uint64_t least, std::uint64_t most) {
  if (value >= least && value <= most) return;
  throw ProtocolError("the header is damaged: its " + std::string(name) + " is " + std::to_string(value) +
                      ", which must be " + std::to_string(least) + " to " + std::to_string(most));
}

constexpr std::uint64_t kMostIndex = std::numeric_limits<std::int32_t>::max();

/// As an unsigned number; a negative one is beyond every bound.
std::uint64_t widened(std::int32_t value) { return static_cast<std::uint64_t>(std::int64_t{value}); }

TensorDesc read_desc(Reader& reader) {
  const auto prefix = get<TensorPrefix>(reader);
  check_field("element size", prefix.element_bytes, 1, kMostElementBytes);
  check_field("flag for gradients", prefix.requires_grad, 0, 1);
  check_field("number of dimensions", prefix.dimensions, 0, kMostDimensions);
  TensorDesc desc{.dtype = prefix.dtype,
                  .element_bytes = prefix.element_bytes,
                  .requires_grad = prefix.requires_grad != 0,
                  .shape = std::vector<std::int64_t>(prefix.dimensions)};
  for (std::int64_t& extent : desc.shape) extent = get<std::int64_t>(reader);
  return desc;
}

}  // namespace

bool write_frame(std::span<std::byte> frame, const core::Action& send, std::uint32_t step, const Tensors& tensors) {
  Writer writer(frame);
  Prefix prefix{.magic = kMagic,
                .version = kVersion,
                .kind = static_cast<std::uint8_t>(send.kind),
                .is_inline = 0,
                .num_tensors = static_cast<std::uint16_t>(tensors.size()),  // if it does not fit, a desc below fails
                .used_bytes = 0,
                .chunk = send.chunk,
                .micro_batch = send.micro_batch,
                .step = step,
                .payload_bytes = 0};
  put(writer, prefix);
  bool on_host = true;
  for (const Tensor& tensor : tensors) {
    const std::size_t bytes = checked_bytes(tensor);
    if (tensor.desc.shape.size() > kMostDimensions) {
      throw std::invalid_argument("a tensor to send has " + std::to_string(tensor.desc.shape.size()) +
                                  " dimensions, more than " + std::to_string(kMostDimensions));
    }
    if (tensor.desc.element_bytes > kMostElementBytes || bytes > kMostPayloadBytes - prefix.payload_bytes) {
      throw std::invalid_argument("the tensors that leave a chunk have more than " + std::to_string(kMostPayloadBytes) +
                                  " bytes, or elements of more than " + std::to_string(kMostElementBytes) +
                                  "; use more micro-batches, or cut the model elsewhere");
    }
    prefix.payload_bytes += bytes;
    on_host = on_host && (bytes == 0 || tensor.buffer->host_data() != nullptr);
    put(writer, TensorPrefix{.dtype = tensor.desc.dtype,
                             .element_bytes = tensor.desc.element_bytes,
                             .requires_grad = static_cast<std::uint8_t>(tensor.desc.requires_grad),
                             .dimensions = static_cast<std::uint8_t>(tensor.desc.shape.size())});
    for (const std::int64_t extent : tensor.desc.shape) put(writer, extent);
  }
  const bool is_inline = on_host && prefix.payload_bytes <= writer.left();
  prefix.is_inline = static_cast<std::uint8_t>(is_inline);
  for (const Tensor& tensor : tensors) {
    std::span<std::byte> place;
    const std::size_t bytes = is_inline ? tensor.buffer->bytes() : 0;
    if (bytes > 0 && writer.take(bytes, place)) std::memcpy(place.data(), tensor.buffer->host_data(), bytes);
  }
  prefix.used_bytes = static_cast<std::uint16_t>(frame.size() - writer.left());
  std::memcpy(frame.data(), &prefix, sizeof(prefix));
  return is_inline;
}

std::size_t used_bytes(std::span<const std::byte> start) {
  Reader reader(start);
  return read_prefix(reader).used_bytes;
}

Header read_frame(std::span<const std::byte> frame) {
  const std::size_t used = used_bytes(frame);
  if (used > frame.size()) {
    throw ProtocolError("the header announces a frame of " + std::to_string(used) + " bytes, of which only " +
                        std::to_string(frame.size()) + " are here");
  }
  Reader reader(frame.first(used));
  const Prefix prefix = read_prefix(reader);
  if (prefix.kind >= core::kNumKinds) {
    throw ProtocolError("the header names the unknown action kind " + std::to_string(prefix.kind));
  }
  if (!core::is_send(static_cast<core::Kind>(prefix.kind))) {
    throw ProtocolError("the header names the action kind " + std::to_string(prefix.kind) + ", which sends nothing");
  }
  check_field("flag for an inline payload", prefix.is_inline, 0, 1);
  check_field("chunk", widened(prefix.chunk), 0, kMostIndex);
  check_field("micro-batch", widened(prefix.micro_batch), 0, kMostIndex);
  check_field("number of payload bytes", prefix.payload_bytes, 0, kMostPayloadBytes);
  Header header;
  header.send = {
      .chunk = prefix.chunk, .kind = static_cast<core::Kind>(prefix.kind), .micro_batch = prefix.micro_batch};
  header.step = prefix.step;
  header.is_inline = prefix.is_inline != 0;
  std::size_t total = 0;
  for (int i = 0; i < prefix.num_tensors; ++i) {
    TensorDesc& desc = header.tensors.emplace_back(read_desc(reader));
    std::size_t bytes = 0;
    try {
      bytes = desc.bytes();
    } catch (const std::invalid_argument& error) {
      throw ProtocolError(std::string("the header is damaged: ") + error.what());
    }
    if (bytes > prefix.payload_bytes - total) {
      throw ProtocolError("the header announces " + std::to_string(prefix.payload_bytes) +
                          " payload bytes, but its tensors have more");
    }
    total += bytes;
  }
  if (total != prefix.payload_bytes) {
    throw ProtocolError("the header announces " + std::to_string(prefix.payload_bytes) +
                        " payload bytes, but its tensors have " + std::to_string(total));
  }
  if (header.is_inline && !reader.take(total, header.payload)) {
    throw ProtocolError("the header announces " + std::to_string(total) + " inline bytes, more than its frame has");
  }
  if (reader.left() > 0) {
    throw ProtocolError("the frame has " + std::to_string(reader.left()) + " bytes that its header does not explain");
  }
  return header;
}

}  // namespace fold3d::comm
