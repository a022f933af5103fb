#include "ops/tensor_group.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "ops/c10d_group.h"

namespace fold3d::ops {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<TensorGroup>> groups;
};

Registry& registry() {
  static Registry only;
  return only;
}

}  // namespace

std::int64_t part_length(std::int64_t length, std::int64_t rank, std::int64_t size) {
  return length / size + (rank < length % size ? 1 : 0);
}

std::int64_t part_begin(std::int64_t length, std::int64_t rank, std::int64_t size) {
  return rank * (length / size) + std::min(rank, length % size);
}

void add_group(const std::string& name, std::shared_ptr<TensorGroup> group) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  if (!known.groups.emplace(name, std::move(group)).second) {
    throw std::invalid_argument("there is a tensor-parallel group \"" + name + "\" already; close it first");
  }
}

void remove_group(const std::string& name, const TensorGroup* group) noexcept {
  std::shared_ptr<TensorGroup> removed;  // goes without the lock
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  const auto found = known.groups.find(name);
  if (found == known.groups.end() || found->second.get() != group) return;
  removed = std::move(found->second);
  known.groups.erase(found);
}

std::shared_ptr<TensorGroup> find_group(const std::string& name, const at::Tensor& x) {
  if (x.is_cpu() || x.is_meta()) {
    Registry& known = registry();
    const std::lock_guard lock(known.mutex);
    if (const auto found = known.groups.find(name); found != known.groups.end()) return found->second;
  }
  return std::make_shared<C10dGroup>(name);
}

}  // namespace fold3d::ops
