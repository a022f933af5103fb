#include "comm/ring/exchange.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

namespace fold3d::comm {
namespace {

int wrapped(int rank, int size) { return ((rank % size) + size) % size; }

/// In the parts only that is read.
std::byte* writable(std::span<const std::byte> bytes) { return const_cast<std::byte*>(bytes.data()); }

Piece flat(std::byte* data, std::size_t bytes) { return {data, 1, bytes, bytes}; }

/// Of `length` things where the `index`-th of `count` consecutive parts begins: longer ones first.
std::size_t even_first(std::size_t length, int index, int count) {
  const auto i = static_cast<std::size_t>(index), n = static_cast<std::size_t>(count);
  return i * (length / n) + std::min(i, length % n);
}

/// The share of a rank's part that travels.
Piece part_of(std::byte* whole, const Split& split, int rank, const Exchange::Operation& operation) {
  const std::size_t stride = split.length * split.unit_bytes;
  const Share share = operation.share, behind{.index = share.index + 1, .count = share.count};
  const std::size_t first = split.share_first(rank, operation.size, share);
  const std::size_t length = split.share_first(rank, operation.size, behind) - first;
  Piece piece{whole + first * split.unit_bytes, split.rows, length * split.unit_bytes, stride};
  if (piece.rows == 1 || piece.row_bytes == stride) piece = flat(piece.data, piece.bytes());
  return piece;
}

void check(const Exchange::Operation& operation, const char* what, std::size_t got, std::size_t wanted) {
  if (operation.size < 2 || operation.rank < 0 || operation.rank >= operation.size) {
    throw std::invalid_argument("there is no rank " + std::to_string(operation.rank) + " in a group of " +
                                std::to_string(operation.size) + "; a ring has at least 2");
  }
  const Share share = operation.share;
  if (share.count < 1 || share.index < 0 || share.index >= share.count) {
    throw std::invalid_argument("there is no share " + std::to_string(share.index) + " of " +
                                std::to_string(share.count));
  }
  if (got != wanted) {
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(got) + " bytes, not " +
                                std::to_string(wanted));
  }
}

void check_shares(const Exchange::Operation& operation, const Split& split) {
  if (operation.share.count > 1 && split.rows > 1) {
    throw std::invalid_argument("parts of several rows have no shares");
  }
}

/// What only sums in place do.
void check_plain(const Exchange::Operation& operation) {
  if (operation.as_bfloat16 || operation.scale != 1.0) {
    throw std::invalid_argument("only reduce-scatters in place are rounded on their way, or scaled");
  }
}

void check_rounding(const Exchange::Operation& operation, const Split& split) {
  if (operation.as_bfloat16 && (operation.number != Number::kFloat32 || split.rows > 1)) {
    throw std::invalid_argument("only one row of float32 elements is rounded on its way");
  }
}

void check_numbers(const Exchange::Operation& operation, std::size_t bytes) {
  if (operation.number == Number::kOther) throw std::invalid_argument("elements of this type cannot be reduced");
  if (bytes % element_bytes(operation.number) != 0) {
    throw std::invalid_argument(std::to_string(bytes) + " bytes are no whole number of elements");
  }
}

}  // namespace

std::size_t Split::first(int rank, int size) const { return even_first(length, rank, size); }

std::size_t Split::share_first(int rank, int size, const Share& share) const {
  return first(rank, size) + even_first(part_length(rank, size), share.index, share.count);
}

std::size_t Split::part_length(int rank, int size) const { return first(rank + 1, size) - first(rank, size); }

std::span<std::byte> Piece::at(std::size_t position, std::size_t longest) const {
  const std::size_t offset = position % row_bytes;
  return {data + position / row_bytes * stride + offset, std::min(longest, row_bytes - offset)};
}

void Piece::take(std::size_t position, std::span<std::byte> into) const {
  while (!into.empty()) {
    const std::span<std::byte> together = at(position, into.size());
    std::memcpy(into.data(), together.data(), together.size());
    into = into.subspan(together.size());
    position += together.size();
  }
}

void Piece::put(std::size_t position, std::span<const std::byte> from) const {
  while (!from.empty()) {
    const std::span<std::byte> together = at(position, from.size());
    std::memcpy(together.data(), from.data(), together.size());
    from = from.subspan(together.size());
    position += together.size();
  }
}

Exchange Exchange::all_reduce(const Operation& operation, std::span<const std::byte> input,
                              std::span<std::byte> output) {
  check(operation, "the output of an all-reduce", output.size(), input.size());
  check_numbers(operation, input.size());
  check_plain(operation);
  Exchange out(Kind::kAllReduce, operation, input.size());
  const int size = operation.size, rank = operation.rank;
  const std::size_t bytes = input.size();
  const std::size_t others = static_cast<std::size_t>(size - 1);
  if (operation.share.count > 1 && input.data() != output.data()) {
    throw std::invalid_argument("shares of an all-reduce are summed in place");
  }
  if (operation.share.count == 1 && bytes * others <= kWholeBytes) {
    const bool in_place = input.data() == output.data();
    if (in_place || size > 2) out.scratch_ = std::make_shared<std::byte[]>((others + 1) * bytes);
    std::byte* own = writable(input);
    if (in_place && bytes > 0) {  // what is sent must stay as it is while others' arrives
      own = out.scratch_.get() + others * bytes;
      std::memcpy(own, input.data(), bytes);
    }
    if (size == 2) {
      out.sends_ = {flat(own, bytes)};
      out.receives_ = {{flat(output.data(), bytes), flat(own, bytes)}};
      return out;
    }
    out.everybodys_.resize(static_cast<std::size_t>(size));
    out.everybodys_[static_cast<std::size_t>(rank)] = own;
    Piece last = flat(own, bytes);
    for (int round = 0; round < size - 1; ++round) {
      out.sends_.push_back(last);
      last = flat(out.scratch_.get() + static_cast<std::size_t>(round) * bytes, bytes);
      out.receives_.push_back({last, {}});
      out.everybodys_[static_cast<std::size_t>(wrapped(rank - 1 - round, size))] = last.data;
    }
    out.total_ = output;
    return out;
  }
  const std::size_t element = element_bytes(operation.number);
  const Split split{.rows = 1, .length = bytes / element, .unit_bytes = element};
  out.add_reduce_rounds(split, writable(input), output.data(), /*is_whole=*/true);
  out.add_gather_rounds(split, part_of(output.data(), split, rank, operation), output.data());
  return out;
}

/// `partial`: a whole tensor if `is_whole`, else memory for this rank's part.
void Exchange::add_reduce_rounds(const Split& split, std::byte* input, std::byte* partial, bool is_whole) {
  const int size = operation_.size, rank = operation_.rank;
  std::size_t longest = 0;
  for (int member = 0; member < size; ++member) {
    longest = std::max(longest, part_of(input, split, member, operation_).bytes());
  }
  if (!is_whole && size > 2) scratch_ = std::make_shared<std::byte[]>(static_cast<std::size_t>(size - 2) * longest);
  Piece last = part_of(input, split, wrapped(rank - 1, size), operation_);
  for (int round = 0; round < size - 1; ++round) {
    const int part = wrapped(rank - 2 - round, size);
    sends_.push_back(last);
    if (is_whole) {
      last = part_of(partial, split, part, operation_);
    } else {
      const bool is_own = round == size - 2;
      const std::size_t begin = split.share_first(rank, size, operation_.share) - split.first(rank, size);
      last =
          flat(is_own ? partial + begin * split.unit_bytes : scratch_.get() + static_cast<std::size_t>(round) * longest,
               part_of(input, split, part, operation_).bytes());
    }
    receives_.push_back({last, part_of(input, split, part, operation_), round == size - 2});
  }
}

/// `own`: this rank's part, wherever it lies.
void Exchange::add_gather_rounds(const Split& split, const Piece& own, std::byte* whole) {
  const int size = operation_.size;
  Piece last = own;
  for (int round = 0; round < size - 1; ++round) {
    sends_.push_back(last);
    last = part_of(whole, split, wrapped(operation_.rank - 1 - round, size), operation_);
    receives_.push_back({last, {}});
  }
}

Exchange Exchange::reduce_scatter(const Operation& operation, const Split& split, std::span<const std::byte> input,
                                  std::span<std::byte> output) {
  check(operation, "the input of a reduce-scatter", input.size(), split.bytes());
  check(operation, "the output of a reduce-scatter", output.size(), split.part_bytes(operation.rank, operation.size));
  check_numbers(operation, split.unit_bytes);
  check_shares(operation, split);
  check_rounding(operation, split);
  Exchange out(Kind::kReduceScatter, operation, input.size());
  const std::size_t place = split.first(operation.rank, operation.size) * split.unit_bytes;
  const bool in_place = split.rows == 1 && output.data() == input.data() + place;
  if (!in_place) check_plain(operation);
  out.add_reduce_rounds(split, writable(input), in_place ? writable(input) : output.data(), in_place);
  return out;
}

Exchange Exchange::all_gather(const Operation& operation, const Split& split, std::span<const std::byte> input,
                              std::span<std::byte> output) {
  check(operation, "the input of an all-gather", input.size(), split.part_bytes(operation.rank, operation.size));
  check(operation, "the output of an all-gather", output.size(), split.bytes());
  Exchange out(Kind::kAllGather, operation, output.size());
  const int size = operation.size, rank = operation.rank;
  check_shares(operation, split);
  check_rounding(operation, split);
  out.copy_to_ = part_of(output.data(), split, rank, operation);
  const std::size_t begin = split.share_first(rank, size, operation.share) - split.first(rank, size);
  out.copy_from_ = flat(writable(input) + begin * split.unit_bytes, out.copy_to_.bytes());
  out.add_gather_rounds(split, out.copy_from_, output.data());
  return out;
}

void Exchange::prepare() const {
  if (copy_from_.bytes() != 0 && copy_from_.data != copy_to_.data)
    copy_to_.put(0, copy_from_.at(0, copy_from_.bytes()));
}

void Exchange::finish() const {
  if (!everybodys_.empty()) combine(operation_.number, operation_.reduction, total_, everybodys_);
}

void Exchange::receive(const Receipt& receipt, std::span<std::byte> target, std::span<const std::byte> own,
                       std::span<const std::byte> arrived) const {
  const Number number = operation_.number;
  const Reduction reduction = operation_.reduction;
  const double scale = receipt.is_last ? operation_.scale : 1.0;
  if (receipt.own.data == nullptr) {
    if (operation_.as_bfloat16) return widen(arrived, target);
    std::memcpy(target.data(), arrived.data(), target.size());
  } else if (operation_.as_bfloat16) {
    receipt.is_last ? add_last_bfloat16(target, arrived, scale) : add_bfloat16(target, arrived);
  } else if (own.data() == target.data() && reduction == Reduction::kSum &&
             (number == Number::kFloat32 || number == Number::kFloat64)) {
    add_scaled(target, arrived, number, scale);
  } else {
    combine(number, reduction, target, std::array{own.data(), arrived.data()});
  }
}

std::string Exchange::name(std::uint64_t sequence) const {
  if (operation_.bucket != kNoBucket) return name_of_bucket(kind_, operation_.bucket, operation_.step);
  return "TP.sync " + std::to_string(sequence) + " (" + to_string(kind_) + " of " + std::to_string(bytes_) + " bytes)";
}

std::string Exchange::name_of_bucket(Kind kind, int bucket, std::int64_t step) {
  return std::string(kind == Kind::kReduceScatter ? "reduce" : "gather") + " of bucket " + std::to_string(bucket) +
         " (step " + std::to_string(step) + ")";
}

const char* to_string(Exchange::Kind kind) {
  switch (kind) {
    case Exchange::Kind::kAllReduce:
      return "all-reduce";
    case Exchange::Kind::kReduceScatter:
      return "reduce-scatter";
    case Exchange::Kind::kAllGather:
      break;
  }
  return "all-gather";
}

}  // namespace fold3d::comm
