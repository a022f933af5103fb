#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/base/number.h"

namespace fold3d::comm {

/// Of each rank's part the `index`-th of `count` consecutive pieces, whose lengths differ by one at most.
struct Share {
  int index = 0;
  int count = 1;
};

/// How a tensor lies in memory whose dimension of `length` is split over the ranks: `rows` (the product of the
/// dimensions before it) times `length` units of `unit_bytes` (the elements of the dimensions behind it). Rank r's part
/// of every row is the r-th of as many consecutive ones as there are ranks; their lengths differ by one at most, longer
/// ones first.
struct Split {
  std::size_t rows = 1;
  std::size_t length = 0;
  std::size_t unit_bytes = 1;

  std::size_t bytes() const { return rows * length * unit_bytes; }
  /// Where rank's part of a row begins and how long it is, in units.
  std::size_t first(int rank, int size) const;
  std::size_t part_length(int rank, int size) const;
  /// Where a share of rank's part of a row begins, from the beginning of the row; the last one's end is share `count`.
  std::size_t share_first(int rank, int size, const Share& share) const;
  std::size_t part_bytes(int rank, int size) const { return rows * part_length(rank, size) * unit_bytes; }
};

/// Equally long pieces of memory at equal distances, counted as one row of bytes.
struct Piece {
  std::byte* data = nullptr;
  std::size_t rows = 1;
  std::size_t row_bytes = 0;
  std::size_t stride = 0;

  std::size_t bytes() const { return rows * row_bytes; }
  /// The bytes from `position` on that lie together, at most `longest`.
  std::span<std::byte> at(std::size_t position, std::size_t longest) const;
  /// Copies bytes [position, position + other.size()) from or to memory that lies together.
  void take(std::size_t position, std::span<std::byte> into) const;
  void put(std::size_t position, std::span<const std::byte> from) const;
};

/// One sum or gather of DP.sync or TP.sync as a member of a ring does it: in round s it sends sends[s] to the next
/// member and receives receives[s] from the previous one. What is sent in a round but the first was received in the
/// round before, byte for byte.
///
/// Sums have an order that depends neither on time nor on how a tensor is sliced, and the same bits on every rank.
/// Input and output do not overlap unless it is said that they may.
class Exchange {
 public:
  enum class Kind : std::uint8_t { kAllReduce, kReduceScatter, kAllGather };

  static constexpr int kNoBucket = -1;

  /// Up to so many bytes that a rank sends in all, an all-reduce goes round whole: a journey costs more than its bytes.
  static constexpr std::size_t kWholeBytes = 64u << 10;

  struct Receipt {
    Piece target;
    Piece own;             ///< combined with what arrives; without memory: what arrives is stored as it is
    bool is_last = false;  ///< of a sum: what is added to it is all that it lacks
  };
  /// What all ranks of the group have in common, and who this one is.
  struct Operation {
    int rank = 0;
    int size = 2;
    Number number = Number::kOther;
    Reduction reduction = Reduction::kSum;
    /// What travels of every part, so that the rest may still be computed, or what was there is computed with. All
    /// shares together do what one exchange does, to the bit. Of several only where the parts' rows are one, and no
    /// small all-reduce, which is not made part by part.
    Share share = {};
    /// kFloat32 elements of one row travel rounded to bfloat16, and are added in float32: of n ranks n - 1 roundings,
    /// and one of the sum, so that a gather of such sums changes nothing. A gather of other values gives them rounded
    /// to all but their owner.
    bool as_bfloat16 = false;
    double scale = 1.0;      ///< what kFloat32 or kFloat64 sums of a reduce-scatter in place are multiplied with
    int bucket = kNoBucket;  ///< and step: what it is called; without: a TP.sync, which are counted
    std::int64_t step = 0;
  };

  /// `output` becomes the sum of everybody's `input`, equally long; they may be the same memory. Small tensors go round
  /// whole and are added in the order of ranks, in one journey around the ring in the place of two; others are reduced
  /// part by part and gathered, as in Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
  /// workstations" (2009): part k is summed from rank k + 1 around the ring to k.
  static Exchange all_reduce(const Operation& operation, std::span<const std::byte> input, std::span<std::byte> output);
  /// `output` becomes this rank's part of the sum of everybody's `input`, whose parts lie as `split` says. In place
  /// where it lies there: of one row, and the other parts of `input` hold nothing of use afterwards.
  static Exchange reduce_scatter(const Operation& operation, const Split& split, std::span<const std::byte> input,
                                 std::span<std::byte> output);
  /// `output` becomes everybody's `input`, each a part as `split` says. `input` may lie where it belongs in `output`.
  static Exchange all_gather(const Operation& operation, const Split& split, std::span<const std::byte> input,
                             std::span<std::byte> output);

  Kind kind() const { return kind_; }
  const Operation& operation() const { return operation_; }
  /// Of the whole tensor: the same on every rank.
  std::size_t bytes() const { return bytes_; }
  const std::vector<Piece>& sends() const { return sends_; }
  const std::vector<Receipt>& receives() const { return receives_; }

  /// Bytes on their way of so many of the tensor's.
  std::size_t wire_bytes(std::size_t bytes) const { return operation_.as_bfloat16 ? bytes / 2 : bytes; }

  /// Before the first receipt, and after the last one; where nothing travels, too.
  void prepare() const;
  void finish() const;

  /// What arrived for a piece of a receipt is combined with what this rank has of it, or, where nothing is, stored.
  /// `target` and `own` are those of the piece, the latter empty where there is nothing.
  void receive(const Receipt& receipt, std::span<std::byte> target, std::span<const std::byte> own,
               std::span<const std::byte> arrived) const;

  /// "TP.sync 17 (all-reduce of 4096 bytes)", the `sequence`-th of a ring; "reduce of bucket 3 (step 7)".
  std::string name(std::uint64_t sequence) const;
  static std::string name_of_bucket(Kind kind, int bucket, std::int64_t step);

 private:
  Exchange(Kind kind, const Operation& operation, std::size_t bytes)
      : kind_(kind), operation_(operation), bytes_(bytes) {}
  void add_reduce_rounds(const Split& split, std::byte* input, std::byte* partial, bool is_whole);
  void add_gather_rounds(const Split& split, const Piece& own, std::byte* whole);

  Kind kind_;
  Operation operation_;
  std::size_t bytes_;
  std::vector<Piece> sends_;
  std::vector<Receipt> receives_;
  std::shared_ptr<std::byte[]> scratch_;
  Piece copy_from_, copy_to_;                 // by prepare()
  std::vector<const std::byte*> everybodys_;  // by finish(): summed in this order
  std::span<std::byte> total_;
};

/// "all-reduce", "reduce-scatter" or "all-gather".
const char* to_string(Exchange::Kind kind);

}  // namespace fold3d::comm
