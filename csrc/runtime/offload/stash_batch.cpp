#include "runtime/offload/stash_batch.h"

#include <c10/core/DispatchKeySet.h>

#include <algorithm>

#include "memory/slot/slot.h"

namespace fold3d::runtime {
namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_meta() && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.is_nested() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() && !tensor.key_set().has_any(c10::functorch_transforms_ks);
}

}  // namespace

SavedTensor StashBatch::save(const at::Tensor& tensor) {
  const bool is_users = tensor.is_leaf() && tensor.requires_grad();
  if (is_users || tensor.numel() == 0 || !is_plain(tensor)) return SavedTensor::staying(tensor);
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (staying_->contains(storage)) return SavedTensor::staying(tensor);

  std::ptrdiff_t last = 0;  // element that lies farthest from the first
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto size = static_cast<std::ptrdiff_t>(tensor.element_size());
  const std::ptrdiff_t first = tensor.storage_offset() * size;
  constexpr auto kAligned = static_cast<std::ptrdiff_t>(memory::kSlotAlignment);
  const std::ptrdiff_t begin = first / kAligned * kAligned;
  const std::ptrdiff_t end = first + (last + 1) * size;
  if (end - begin < kLeastBytes) return SavedTensor::staying(tensor);

  std::weak_ptr<StashMemory>& known = by_storage_[storage];
  std::shared_ptr<StashMemory> memory = known.lock();
  if (!memory) {
    memory = std::make_shared<StashMemory>(StashMemory{tensor.storage(), 0, begin, end});
    known = memory;
    memories_.push_back(memory);
  } else {
    memory->begin = std::min(memory->begin, begin);
    memory->end = std::max(memory->end, end);
  }
  return {tensor, std::move(memory)};
}

}  // namespace fold3d::runtime
