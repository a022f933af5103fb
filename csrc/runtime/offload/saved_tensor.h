// SavedTensor: what autograd keeps of a tensor whose memory may be away when nobody reads it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>
#include <optional>

namespace fold3d::runtime {

/// The part of a storage that one stash needs; lives as long as somebody may read it. Who moves it writes, who reads it
/// has waited for that.
struct StashMemory {
  c10::Storage storage;      ///< none while it is away
  std::ptrdiff_t base = 0;   ///< where in the storage that was saved `storage` begins
  std::ptrdiff_t begin = 0;  ///< of the part, in the storage that was saved; bytes
  std::ptrdiff_t end = 0;

  std::size_t bytes() const { return static_cast<std::size_t>(end - begin); }
  /// Its bytes, uint8 [bytes()].
  at::Tensor view() const;
};

/// A tensor without its memory. Copies share it.
class SavedTensor {
 public:
  /// `tensor` itself, which stays where it is.
  static SavedTensor staying(const at::Tensor& tensor);
  SavedTensor(const at::Tensor& tensor, std::shared_ptr<StashMemory> memory);
  /// A contiguous tensor over all of `memory`, that nobody has seen yet.
  SavedTensor(at::TensorOptions options, at::IntArrayRef sizes, std::shared_ptr<StashMemory> memory);

  /// The tensor with the memory where it is now, without history. Throws c10::Error, as autograd does, if somebody
  /// wrote into the tensor after it was saved, and if the memory is away.
  at::Tensor tensor() const;
  bool moves() const { return memory_ != nullptr; }

 private:
  explicit SavedTensor(const at::Tensor& tensor);

  at::Tensor held_;  // if it stays
  std::shared_ptr<StashMemory> memory_;
  at::TensorOptions options_;
  std::ptrdiff_t offset_ = 0;  // of the first element, in the storage that was saved; bytes
  c10::DimVector sizes_, strides_;
  c10::VariableVersion version_;
  std::uint32_t saved_version_ = 0;
};

}  // namespace fold3d::runtime
