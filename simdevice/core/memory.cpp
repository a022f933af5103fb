#include "simdevice/core/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace simdevice {

namespace {

constexpr std::size_t kSmall = 512, kLarge = std::size_t{1} << 20, kAlignment = 512;
/// Fills memory that nothing has been written to: NaN in every floating-point dtype.
constexpr int kUnwritten = 0xFF;

std::size_t rounded(std::size_t size) {
  const std::size_t unit = size <= kLarge ? kSmall : kLarge;
  return (size + unit - 1) / unit * unit;
}

}  // namespace

void Memory::collect() {
  std::erase_if(waiting_, [this](Waiting& one) {
    for (const auto& mark : one.marks) {
      if (!mark->is_passed()) return false;
    }
    for (const auto& mark : one.marks) one.block->history.forget(mark->seen());
    free_[{one.block->device, one.block->stream, one.block->capacity}].push_back(one.block);
    return true;
  });
}

Block* Memory::allocate(int device, Stream* stream, std::size_t size) {
  collect();
  const std::size_t capacity = rounded(size);
  auto& list = free_[{device, stream, capacity}];
  MemoryStats& stats = stats_[device];
  Block* block = nullptr;
  if (!list.empty()) {
    block = list.back();
    list.pop_back();
  } else {
    void* data = std::aligned_alloc(kAlignment, capacity);
    if (data == nullptr) throw std::bad_alloc();
    std::memset(data, kUnwritten, capacity);
    block = new Block;
    block->data = data;
    block->capacity = capacity;
    block->device = device;
    block->stream = stream;
    by_address_[block->begin()] = block;
    stats.reserved += capacity;
  }
  block->size = size;
  handed_out_.insert(block);
  stats.allocated += capacity;
  stats.peak = std::max(stats.peak, stats.allocated);
  return block;
}

void Memory::free(Block* block, std::vector<std::shared_ptr<Mark>> marks) {
  stats_[block->device].allocated -= block->capacity;
  handed_out_.erase(block);
  block->users.clear();
  waiting_.push_back({block, std::move(marks)});
  collect();
}

Block* Memory::find(std::uintptr_t address) const {
  auto after = by_address_.upper_bound(address);
  if (after == by_address_.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return address < block->begin() + block->capacity ? block : nullptr;
}

void Memory::release() {
  collect();
  for (auto& [key, blocks] : free_) {
    for (Block* block : blocks) {
      stats_[block->device].reserved -= block->capacity;
      by_address_.erase(block->begin());
      std::free(block->data);
      delete block;
    }
  }
  free_.clear();
}

MemoryStats Memory::stats(int device) const {
  const auto found = stats_.find(device);
  return found == stats_.end() ? MemoryStats{} : found->second;
}

void Memory::reset_peak(int device) { stats_[device].peak = stats_[device].allocated; }

}  // namespace simdevice
