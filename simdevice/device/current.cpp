#include "simdevice/device/current.h"

#include <c10/util/Exception.h>

#include <vector>

namespace simdevice {

namespace {

thread_local int thread_device = 0;
thread_local std::vector<Stream*> thread_streams;  // of each device; null: the default one

}  // namespace

int current_device() { return thread_device; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < runtime().devices(), "the simulated device has the indices 0 to ",
              runtime().devices() - 1, ", not ", device, " (FOLD3D_SIM_DEVICES says how many there are)");
  thread_device = device;
}

Stream* current_stream(int device) {
  if (device < 0) device = thread_device;
  thread_streams.resize(static_cast<std::size_t>(runtime().devices()));
  Stream*& stream = thread_streams.at(static_cast<std::size_t>(device));
  if (stream == nullptr) stream = runtime().stream(device, 0);
  return stream;
}

Stream* exchange_current_stream(Stream* stream) {
  Stream* const before = current_stream(stream->device());
  thread_streams[static_cast<std::size_t>(stream->device())] = stream;
  return before;
}

int index_of(const c10::Device& device) { return device.has_index() ? device.index() : thread_device; }

c10::Device device_at(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

Stream* stream_of(const c10::Stream& stream) { return runtime().stream(index_of(stream.device()), stream.id()); }

c10::Stream as_c10(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(stream->device()), stream->id());
}

}  // namespace simdevice
