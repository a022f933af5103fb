#include "runtime/offload/offloader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/ir/stash.h"
#include "memory/disk_tier.h"
#include "memory/room/slot_wait.h"
#include "memory/slot/slot.h"

namespace fold3d::runtime {
namespace {

/// Memory of more bytes gets a transfer and an allocation of its own; all that is smaller comes and goes together.
constexpr std::size_t kSmall = std::size_t{256} << 10;

memory::HostPool::MakeTier maker(const OffloadOptions& options, memory::ReserveHost reserve) {
  if (!options.disk.empty()) {
    return [folder = options.disk](std::size_t bytes) { return std::make_shared<memory::DiskTier>(bytes, folder); };
  }
  return
      [reserve = std::move(reserve)](std::size_t bytes) { return std::make_shared<memory::HostTier>(bytes, reserve); };
}

}  // namespace

void Offloader::Arena::add(std::int64_t more) {
  const std::int64_t now = bytes.fetch_add(more) + more;
  std::int64_t most = peak.load();
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
}

Offloader::Offloader(c10::Device device, OffloadOptions options, std::shared_ptr<StreamClock> clock)
    : device_(device),
      options_(std::move(options)),
      clock_(std::move(clock)),
      copies_(device, options_.packs, clock_),
      pool_(maker(options_, copies_.reserve()), static_cast<std::size_t>(options_.pool_bytes)),
      out_("offload", std::make_shared<memory::CopyRate>(options_.bytes_per_second)),
      in_("prefetch", out_.rate()),
      landing_(pool_, out_, in_, plan_, options_.timeout) {
  if (options_.expected_bytes > 0) pool_.reserve(static_cast<std::size_t>(options_.expected_bytes));
}

void Offloader::begin(const core::Shape& shape, const std::vector<core::Action>& program) {
  // A run that failed may have left copies under way: theirs are slots, and memory of tensors that are no longer used.
  for (memory::CopyLane* const lane : {&out_, &in_}) lane->wait_for_all(options_.timeout, options_.while_waiting);
  plan_.begin(shape, program);
  const std::optional<std::int64_t> needed = plan_.peak();
  const std::int64_t spare = needed ? std::max<std::int64_t>(0, pool_.counters().bytes - *needed) : 0;
  landing_.begin(pool_.grows() ? memory::LandingRoom::kAnyNumber : spare);
  stashes_leaving_.clear();
  borders_leaving_.clear();
  pool_.begin();
  arena_->peak = arena_->bytes.load();
  late_ = 0;
}

void Offloader::keep(const std::vector<at::Tensor>& tensors) {
  auto staying = std::make_shared<Staying>();
  for (const at::Tensor& tensor : tensors) {
    if (tensor.has_storage()) staying->insert(tensor.storage().unsafeGetStorageImpl());
  }
  staying_ = std::move(staying);
}

std::shared_ptr<void> Offloader::on_device(std::int64_t bytes) const {
  arena_->add(bytes);
  return {nullptr, [arena = arena_, bytes](void*) { arena->add(-bytes); }};
}

void Offloader::stashed(StashBatch& batch) {
  std::int64_t bytes = 0;
  for (const auto& each : batch.memories_) {
    if (const auto memory = each.lock()) bytes += static_cast<std::int64_t>(memory->bytes());
  }
  batch.by_storage_.clear();
  batch.on_device_ = on_device(bytes);
}

void Offloader::wait(memory::CopyLane& lane, memory::CopyLane::Ticket ticket, const core::Action& action) {
  if (lane.is_done(ticket)) return;
  const comm::Moment start = clock_->now();
  lane.wait(ticket, options_.timeout, options_.while_waiting);
  waits_.push_back({action, true, start, clock_->now(), 0});
  ++late_;
}

void Offloader::leave(const std::shared_ptr<StashBatch>& batch, const core::Action& action) {
  Leaving& leaving = action.kind == core::Kind::kOffload ? stashes_leaving_ : borders_leaving_;
  while (leaving.size() >= static_cast<std::size_t>(core::kOffloadsUnderWay)) {
    wait(out_, leaving.front().first, leaving.front().second);
    leaving.pop_front();
  }
  std::vector<std::shared_ptr<StashMemory>> moving;
  for (const auto& each : batch->memories_) {
    if (auto memory = each.lock()) moving.push_back(std::move(memory));
  }
  const auto first_small =
      std::stable_partition(moving.begin(), moving.end(), [](const auto& memory) { return memory->bytes() > kSmall; });
  batch->small_ = static_cast<std::size_t>(first_small - moving.begin());
  std::vector<DevicePiece> pieces;
  std::size_t total = 0;
  for (const auto& memory : moving) {
    batch->places_.push_back({memory, total});
    pieces.push_back({memory->view(), total});
    total = memory::slot_aligned(total + memory->bytes());
  }
  if (moving.empty()) return;
  plan_.make_room(pool_, action, total);
  batch->slot_ = memory::take_waiting(pool_, in_, total, core::to_string(action),
                                      [&](memory::CopyLane::Ticket ticket) { wait(in_, ticket, action); });
  DeviceEvent ready;
  ready.record(current_stream(device_));
  auto start = std::make_shared<memory::DeviceStart>();
  auto copy = [this, start, slot = batch->slot_, pieces = std::move(pieces), small = batch->small_,
               ready = std::make_shared<DeviceEvent>(std::move(ready)), moving = std::move(moving),
               counted = std::move(batch->on_device_)]() mutable {
    copies_.out(slot, pieces, small, *ready, *start);
    pieces.clear();
    for (const auto& memory : moving) memory->storage = {};
    counted.reset();
  };
  // std::function copies what it holds: one level of indirection keeps that cheap.
  auto job = std::make_shared<decltype(copy)>(std::move(copy));
  batch->left_ = out_.submit(action, total, [job = std::move(job)] { (*job)(); }, std::move(start));
  leaving.emplace_back(batch->left_, action);
}

Parcel Offloader::landed(const comm::Tensors& message) const {
  Parcel parcel{batch(), {}, {}};
  for (const comm::Tensor& tensor : message) {
    const auto& buffer = static_cast<const SlotBuffer&>(*tensor.buffer);
    const auto options = at::TensorOptions().device(device_).dtype(static_cast<at::ScalarType>(tensor.desc.dtype));
    const std::size_t bytes = tensor.desc.bytes();
    if (bytes == 0) {
      parcel.add(SavedTensor::staying(at::empty(tensor.desc.shape, options)), tensor.desc.requires_grad);
      continue;
    }
    auto memory = std::make_shared<StashMemory>(StashMemory{{}, 0, 0, static_cast<std::ptrdiff_t>(bytes)});
    parcel.batch->places_.push_back({memory, buffer.offset()});
    parcel.batch->slot_ = buffer.slot();
    parcel.add(SavedTensor(options, tensor.desc.shape, std::move(memory)), tensor.desc.requires_grad);
  }
  parcel.batch->small_ = parcel.batch->places_.size();  // each is copied by itself
  return parcel;
}

void Offloader::come(const std::shared_ptr<StashBatch>& batch, const core::Action& action) {
  if (!batch->slot_) return;
  wait(out_, batch->left_, action);
  std::vector<std::shared_ptr<StashMemory>> moving;
  std::vector<DevicePiece> pieces;
  std::int64_t total = 0;
  const auto allocate = [&](std::size_t bytes) {
    total += static_cast<std::int64_t>(bytes);
    return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device_));
  };
  const std::size_t count = batch->places_.size();
  std::size_t end = 0;  // of the last small one that is still wanted
  for (std::size_t k = 0; k < count; ++k) {
    auto memory = batch->places_[k].memory.lock();
    if (!memory) continue;
    if (k >= batch->small_) {
      end = batch->places_[k].offset + memory->bytes();
    } else {
      pieces.push_back({allocate(memory->bytes()), batch->places_[k].offset});
      memory->storage = pieces.back().memory.storage();
      memory->base = memory->begin;
    }
    moving.push_back(std::move(memory));
  }
  if (end > 0) {
    const std::size_t begin = batch->places_[batch->small_].offset;
    pieces.push_back({allocate(end - begin), begin});
    for (std::size_t k = batch->small_; k < count; ++k) {
      const auto memory = batch->places_[k].memory.lock();
      if (!memory) continue;
      memory->storage = pieces.back().memory.storage();
      memory->base = memory->begin - static_cast<std::ptrdiff_t>(batch->places_[k].offset - begin);
    }
  }
  batch->on_device_ = on_device(total);
  auto ready = std::make_shared<DeviceEvent>();
  ready->record(current_stream(device_));
  batch->arrived_ = std::make_shared<DeviceEvent>();
  auto start = std::make_shared<memory::DeviceStart>();
  auto job = [this, start, slot = std::exchange(batch->slot_, {}), pieces = std::move(pieces), ready,
              arrived = batch->arrived_,
              moving = std::move(moving)] { copies_.in(slot, pieces, *ready, *arrived, *start); };
  auto shared = std::make_shared<decltype(job)>(std::move(job));
  const auto bytes = static_cast<std::size_t>(total);
  if (device_.is_cpu()) {
    batch->came_ = in_.submit(action, bytes, [shared = std::move(shared)] { (*shared)(); });
    return;
  }
  batch->came_ = in_.submit(action, 0, [shared] { (*shared)(); });
  // What is copied stays where it is, and so does its slot, until the device is there.
  in_.submit(
      action, bytes, [shared = std::move(shared), arrived = batch->arrived_] { arrived->synchronize(); },
      std::move(start));
}

void Offloader::arrived(StashBatch& batch, const core::Action& action) {
  if (batch.came_ == 0) return;
  wait(in_, batch.came_, action);
  const comm::Moment start = clock_->now();
  batch.arrived_->block(current_stream(device_));
  if (clock_->is_of_device()) waits_.push_back({action, true, start, clock_->now(), 0});
}

std::vector<CopySpan> Offloader::take_spans() {
  for (memory::CopyLane* const lane : {&out_, &in_}) {
    for (const memory::CopyRecord& record : lane->take_records()) {
      if (record.bytes == 0) continue;
      const comm::Moment start = record.device_start.value_or(record.start_ns);
      copied_.push_back({record.action, false, start, record.end_ns, static_cast<std::int64_t>(record.bytes)});
    }
  }
  const auto is_known = [](const CopySpan& span) { return span.end.ns() && span.start.ns(); };
  std::vector<CopySpan> spans = comm::take_known(waits_, is_known);
  for (CopySpan& span : comm::take_known(copied_, is_known)) spans.push_back(std::move(span));
  return spans;
}

OffloadCounters Offloader::counters() const {
  const memory::PoolCounters pool = pool_.counters();
  return {arena_->bytes, arena_->peak, pool.bytes, pool.peak, late_};
}

}  // namespace fold3d::runtime
