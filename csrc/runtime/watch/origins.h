// Where the tensors come from that a piece of code computes with.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace fold3d::runtime {

/// Mixes two numbers into one, the same in every process.
inline std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {  // the finalizer of splitmix64
  std::uint64_t x = a * 0x9e3779b97f4a7c15ULL + b;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// A number of a text, the same in every process.
std::uint64_t number_of(std::string_view text);

/// Where a tensor comes from, in a few words: code with loops has few such origins, however often the loops run. So no
/// origin counts operators; it looks back two of them, and all the way for what the code was given.
struct Origin {
  std::uint64_t kind = 0;   ///< the operator that made it, and which of its results it is
  std::uint64_t near = 0;   ///< the same, and the kinds of what that was made from
  std::uint64_t given = 0;  ///< a bit for each argument, parameter and buffer that it depends on; they may share bits

  /// That of result number `index` of an operator, given the operator's. From the fourth one on they are alike: code
  /// may loop over them.
  Origin of_result(std::uint64_t index) const;
};

/// Origins of tensors while one piece of code runs.
///
/// A tensor is known by its TensorImpl, whatever memory that is pointed at. A weak reference keeps the TensorImpl's own
/// memory, not the tensor's, so its address is never another tensor's before this ends.
class Origins {
 public:
  Origins() : slots_(128) {}

  bool knows(const at::Tensor& tensor) const { return slots_[slot_of(tensor)].tensor != nullptr; }

  /// That of what nobody has set is one for all of them.
  const Origin& of(const at::Tensor& tensor) const;

  void set(const at::Tensor& tensor, const Origin& origin);

 private:
  struct Slot {
    const c10::TensorImpl* tensor = nullptr;
    Origin origin;
  };

  std::size_t slot_of(const at::Tensor& tensor) const { return slot_of(tensor.unsafeGetTensorImpl()); }
  std::size_t slot_of(const c10::TensorImpl* tensor) const;
  void grow();

  std::vector<Slot> slots_;  // as many as a power of two
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> held_;
};

/// What the tensors among an operator's arguments say of the operator, and of what it makes.
class Operands {
 public:
  /// `op`: a number of the operator. `ordered`: whether it matters which argument a tensor is.
  Operands(const Origins& origins, std::uint64_t op, bool ordered = true)
      : origins_(origins), ordered_(ordered), sources_(op), near_(op), kind_(op) {}

  void add(const at::Tensor& tensor, std::uint64_t place);

  /// Of a list's tensors counts which origins there are, in the order in which they first come: not how many.
  void add(c10::ArrayRef<c10::IValue> tensors, std::uint64_t place);

  /// A number of the operator and of where its tensors come from; 0: there are none.
  std::uint64_t sources() const { return count_ == 0 ? 0 : sources_; }

  /// That of what the operator makes (`Origin::of_result`).
  Origin origin() const { return {.kind = kind_, .near = near_, .given = given_}; }

 private:
  void add(const Origin& origin, std::uint64_t place);

  const Origins& origins_;
  const bool ordered_;
  std::size_t count_ = 0;
  std::uint64_t sources_, near_, kind_, given_ = 0;
};

}  // namespace fold3d::runtime
