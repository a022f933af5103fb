#include "runtime/watch/origins.h"

#include <algorithm>
#include <array>

namespace fold3d::runtime {
namespace {

constexpr std::size_t kMostOrigins = 16;  // of the tensors in one list
constexpr std::uint64_t kLastResult = 3;

const Origin& unknown() {
  static const Origin origin{.kind = number_of("unknown"), .near = number_of("unknown"), .given = 1};
  return origin;
}

}  // namespace

std::uint64_t number_of(std::string_view text) {  // FNV-1a: std::hash is another one in another process
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3ULL;
  return hash;
}

Origin Origin::of_result(std::uint64_t index) const {
  const std::uint64_t result = std::min(index, kLastResult);
  return {.kind = mixed(kind, result), .near = mixed(near, result), .given = given};
}

const Origin& Origins::of(const at::Tensor& tensor) const {
  const Slot& slot = slots_[slot_of(tensor)];
  return slot.tensor == nullptr ? unknown() : slot.origin;
}

void Origins::set(const at::Tensor& tensor, const Origin& origin) {
  if (!tensor.defined()) return;
  std::size_t slot = slot_of(tensor);
  if (slots_[slot].tensor == nullptr) {
    held_.emplace_back(tensor.getIntrusivePtr());
    if (2 * held_.size() > slots_.size()) {
      grow();
      slot = slot_of(tensor);
    }
    slots_[slot].tensor = tensor.unsafeGetTensorImpl();
  }
  slots_[slot].origin = origin;
}

std::size_t Origins::slot_of(const c10::TensorImpl* tensor) const {
  const std::size_t mask = slots_.size() - 1;
  const std::uint64_t address = reinterpret_cast<std::uintptr_t>(tensor);
  std::size_t slot = ((address * 0x9e3779b97f4a7c15ULL) >> 32) & mask;
  while (slots_[slot].tensor != nullptr && slots_[slot].tensor != tensor) slot = (slot + 1) & mask;
  return slot;
}

void Origins::grow() {
  std::vector<Slot> before(2 * slots_.size());
  before.swap(slots_);
  for (const Slot& one : before) {
    if (one.tensor != nullptr) slots_[slot_of(one.tensor)] = one;
  }
}

void Operands::add(const at::Tensor& tensor, std::uint64_t place) {
  if (tensor.defined()) add(origins_.of(tensor), place);
}

void Operands::add(c10::ArrayRef<c10::IValue> tensors, std::uint64_t place) {
  std::array<std::uint64_t, kMostOrigins> seen{};
  std::size_t count = 0;
  for (const c10::IValue& one : tensors) {
    if (!one.isTensor() || !one.toTensor().defined()) continue;
    const Origin& origin = origins_.of(one.toTensor());
    const std::uint64_t number = mixed(origin.near, origin.given);
    const auto end = seen.begin() + count;
    if (std::find(seen.begin(), end, number) != end) continue;
    seen[count++] = number;
    add(origin, place);
    if (count == kMostOrigins) return;
  }
}

void Operands::add(const Origin& origin, std::uint64_t place) {
  ++count_;
  given_ |= origin.given;
  const std::uint64_t source = mixed(origin.near, origin.given);
  if (ordered_) {
    sources_ = mixed(sources_ + place, source);
    near_ = mixed(near_ + place, origin.kind);
  } else {
    sources_ += mixed(1, source);
    near_ += mixed(1, origin.kind);
  }
}

}  // namespace fold3d::runtime
