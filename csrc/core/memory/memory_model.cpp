#include "core/memory/memory_model.h"

#include <stdexcept>
#include <string>

namespace fold3d::core {
namespace {

void check_size(const char* name, std::size_t found, int wanted, const Shape& shape) {
  if (found == static_cast<std::size_t>(wanted)) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(found) + " entries, the schedule (" +
                              to_string(shape) + ") needs " + std::to_string(wanted));
}

void check_bytes(const char* name, std::size_t entry, std::int64_t bytes) {
  if (bytes >= 0) return;
  throw std::invalid_argument(std::string(name) + " of entry " + std::to_string(entry) + " is " +
                              std::to_string(bytes) + "; bytes cannot be negative");
}

}  // namespace

void MemoryModel::check(const Shape& shape) const {
  check_size("chunks", chunks.size(), shape.num_chunks(), shape);
  if (!host.empty()) check_size("host", host.size(), shape.pp, shape);
  if (!update.empty()) check_size("update", update.size(), shape.pp, shape);
  if (receive_ahead < 0) {
    throw std::invalid_argument("receive_ahead is " + std::to_string(receive_ahead) + "; it cannot be negative");
  }
  for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk) {
    const ChunkBytes& bytes = chunks[chunk];
    check_bytes("weights", chunk, bytes.weights);
    check_bytes("gradients", chunk, bytes.gradients);
    check_bytes("optimizer", chunk, bytes.optimizer);
    check_bytes("inputs", chunk, bytes.inputs);
    check_bytes("saved", chunk, bytes.saved);
    check_bytes("kept", chunk, bytes.kept);
    check_bytes("forward", chunk, bytes.forward);
    check_bytes("backward", chunk, bytes.backward);
  }
  if (head) {
    check_bytes("head gradients", chunks.size() - 1, head->gradients);
    check_bytes("head saved", chunks.size() - 1, head->saved);
    check_bytes("head forward", chunks.size() - 1, head->forward);
    check_bytes("head backward", chunks.size() - 1, head->backward);
  }
  for (std::size_t stage = 0; stage < host.size(); ++stage) check_bytes("host", stage, host[stage]);
  for (std::size_t stage = 0; stage < update.size(); ++stage) check_bytes("update", stage, update[stage]);
}

}  // namespace fold3d::core
