// Python's view of the simulated device: what torch's own interface has no name for.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <string>

#include "simdevice/bindings/python_line.h"
#include "simdevice/c10d/sim_backend.h"
#include "simdevice/device/allocators.h"
#include "simdevice/device/current.h"
#include "simdevice/device/generator.h"
#include "simdevice/device/guard.h"
#include "simdevice/device/hooks.h"
#include "simdevice/device/left_out.h"
#include "simdevice/device/tensors.h"
#include "simdevice/operators/fallback.h"
#include "simdevice/operators/registrations.h"

namespace py = pybind11;

namespace simdevice {

namespace {

using Milliseconds = std::chrono::duration<double, std::milli>;

void sleep_on_stream(double milliseconds) {
  Stream* const stream = current_stream();
  const auto duration = std::chrono::duration_cast<std::chrono::nanoseconds>(Milliseconds(milliseconds));
  launch_kernel(stream, "sleep", {}, [stream, duration] { stream->occupy_until(stream->free_since() + duration); });
}

/// What is queued between the two takes up the stream for a given time, if it takes no longer by itself.
class Occupation {
 public:
  Occupation() : stream_(current_stream()) {
    launch_kernel(stream_, "begin to occupy", {},
                  [stream = stream_, begun = begun_] { *begun = stream->free_since(); });
  }

  void end(double milliseconds) {
    const auto duration = std::chrono::duration_cast<std::chrono::nanoseconds>(Milliseconds(milliseconds));
    launch_kernel(stream_, "occupy", {},
                  [stream = stream_, begun = begun_, duration] { stream->occupy_until(*begun + duration); });
  }

 private:
  Stream* const stream_;
  const std::shared_ptr<std::chrono::steady_clock::time_point> begun_ =
      std::make_shared<std::chrono::steady_clock::time_point>();  // of the stream's thread
};

void set_races(const std::string& races) {
  if (races == "raise") return runtime().set_races(Races::kRaise);
  if (races == "record") return runtime().set_races(Races::kRecord);
  if (races == "off") return runtime().set_races(Races::kOff);
  throw std::invalid_argument("races is raise, record or off, not " + races);
}

void use_on_host(const at::Tensor& tensor, bool writes, const std::string& what) {
  std::vector<Access> accesses;
  add_access(accesses, tensor, writes);
  for (const Access& access : accesses) runtime().use_on_host(what + python_line(), access);
}

}  // namespace

}  // namespace simdevice

PYBIND11_MODULE(_simdevice, m) {
  using namespace simdevice;
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def("register_device", [] {
    register_allocators();
    register_guard();
    register_hooks();
    set_locator(&python_line);
    return register_operators();
  });
  m.def("device_count", [] { return runtime().devices(); });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("synchronize", [](int device) { runtime().synchronize(device < 0 ? current_device() : device); }, unlocked);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("sleep", &sleep_on_stream, unlocked);
  py::class_<Occupation>(m, "Occupation").def(py::init<>()).def("end", &Occupation::end, unlocked);
  m.def("set_races", &set_races);
  m.def("set_poison", [](bool poison) { runtime().set_poison(poison); });
  m.def("set_jitter", [](std::int64_t microseconds) { set_jitter(std::chrono::microseconds(microseconds)); });
  m.def("set_device_bytes", &set_device_bytes);
  m.def("set_network", &set_network);
  m.def("take_reports", [] { return runtime().take_reports(); });
  m.def("launches", [] { return runtime().launches(); });
  m.def("host_waits", &Runtime::waits);
  m.def("blocking_operators", &blocking_operators);
  m.def("use_on_host", &use_on_host);
  m.def("leave_out", &leave_out);
  m.def("leave_nothing_out", &leave_nothing_out);
  m.def("process_group", [](const BackendPtr& gloo, int rank, int size) -> BackendPtr {
    return c10::make_intrusive<SimBackend>(gloo, rank, size);
  });
  m.def(
      "drain",
      [](double seconds) {
        return runtime().drain(std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000)));
      },
      unlocked);
}
