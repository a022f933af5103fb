// Parcel: tensors that wait in the pool, or on their way to it and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "runtime/offload/saved_tensor.h"
#include "runtime/offload/stash_batch.h"

namespace fold3d::runtime {

struct Parcel {
  std::shared_ptr<StashBatch> batch;  ///< what moves; null: there is nothing in the parcel
  std::vector<SavedTensor> tensors;
  std::vector<bool> requires_grad;

  explicit operator bool() const { return batch != nullptr; }

  void add(SavedTensor tensor, bool tracks) {
    tensors.push_back(std::move(tensor));
    requires_grad.push_back(tracks);
  }

  /// The tensors, once their memory is back; leaves. Nothing is in the parcel after that.
  std::vector<at::Tensor> unpack() {
    std::vector<at::Tensor> leaves;
    leaves.reserve(tensors.size());
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      leaves.push_back(tensors[k].tensor());
      if (requires_grad[k]) leaves.back().set_requires_grad(true);
    }
    *this = {};
    return leaves;
  }
};

}  // namespace fold3d::runtime
