#include "simdevice/device/guard.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <memory>

#include "simdevice/device/allocators.h"
#include "simdevice/device/current.h"
#include "simdevice/device/left_out.h"

namespace simdevice {

namespace {

/// What a c10::Event points to.
struct Recorded {
  std::shared_ptr<Mark> mark;  // of its last recording
  bool is_timing = false;
};

const Recorded& recorded(void* event) { return *static_cast<Recorded*>(event); }
const std::shared_ptr<Mark>& mark_of(void* event) { return recorded(event).mark; }

/// Whether the device has passed it. Who only measures must not hide that an order is missing: where an event notes the
/// time, the answer orders nothing for the detector.
bool is_passed(void* event) {
  return recorded(event).is_timing ? mark_of(event)->is_passed() : runtime().query(mark_of(event));
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < deviceCount()) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(runtime().devices()); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return as_c10(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_at(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool urgent) const override {
    return getNewStream(device, urgent ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return as_c10(runtime().stream_from_pool(index_of(device), priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_c10(exchange_current_stream(stream_of(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return stream_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return runtime().query(stream_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { runtime().synchronize(stream_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    runtime().synchronize(device < 0 ? current_device() : device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Recorded;
    *static_cast<Recorded*>(*event) = {runtime().record(stream_of(stream)), flag == c10::EventFlag::BACKEND_DEFAULT};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr || is_left_out(Ordering::kEventBlock)) return;
    runtime().wait(stream_of(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr || is_left_out(Ordering::kEventQuery)) return true;
    return is_left_out(Ordering::kNews) ? mark_of(event)->is_passed() : is_passed(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr || is_left_out(Ordering::kEventSynchronize)) return;
    runtime().synchronize(mark_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "elapsed_time of an event that was not recorded");
    TORCH_CHECK(mark_of(from)->is_passed() && mark_of(to)->is_passed(),
                "elapsed_time of an event that the device has not come to yet");
    return std::chrono::duration<double, std::milli>(mark_of(to)->time() - mark_of(from)->time()).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Block* const block = block_of(data);
    if (block != nullptr && !is_left_out(Ordering::kRecordStream)) runtime().record_use(block, stream_of(stream));
  }
};

}  // namespace

void register_guard() { c10::impl::registerDeviceGuard(c10::kPrivateUse1, new Guard); }

}  // namespace simdevice
