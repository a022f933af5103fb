#include "simdevice/device/tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <atomic>

#include "simdevice/device/allocators.h"

namespace simdevice {

namespace {

std::atomic<Locator> locate{nullptr};

/// A kernel's thread is below autograd.
class KernelTask final : public Task {
 public:
  explicit KernelTask(std::unique_ptr<Task> task) : task_(std::move(task)) {}
  void run() override {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::AutoGradMode no_grad(false);
    task_->run();
    task_.reset();  // what it holds on to are tensors, too
  }

 private:
  std::unique_ptr<Task> task_;
};

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  const c10::Storage& memory = tensor.storage();
  c10::DataPtr data(const_cast<void*>(memory.data_ptr().get()), c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), memory.nbytes(), std::move(data), nullptr, false);
  auto alias = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                    tensor.dtype());
  alias->set_storage_offset(tensor.storage_offset());
  alias->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias->set_wrapped_number(true);
  at::Tensor out(std::move(alias));
  if (tensor.is_conj()) out._set_conj(true);
  if (tensor.is_neg()) out._set_neg(true);
  return out;
}

Block* block_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  Block* const own = block_of(data);
  // from_blob: the memory is somebody else's.
  return own == nullptr && tensor.is_privateuseone() ? runtime().find(data.get()) : own;
}

void add_access(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes) {
  Block* const block = block_of(tensor);
  if (block == nullptr || tensor.numel() == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.storage().data_ptr().get()) +
                     static_cast<std::uintptr_t>(tensor.storage_offset()) * tensor.itemsize();
  const Footprint bytes =
      footprint_of(begin, tensor.sizes().vec(), tensor.strides().vec(), static_cast<std::int64_t>(tensor.itemsize()));
  accesses.push_back({block, bytes, writes});
}

void set_locator(Locator locator) { locate = locator; }

void launch_task(Stream* stream, const std::string& name, const std::vector<Access>& accesses,
                 std::unique_ptr<Task> task) {
  const Locator locator = locate;
  runtime().launch(stream, locator == nullptr ? name : name + locator(), accesses,
                   std::make_unique<KernelTask>(std::move(task)));
}

}  // namespace simdevice
