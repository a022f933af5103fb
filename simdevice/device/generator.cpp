#include "simdevice/device/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <vector>

#include "simdevice/device/current.h"

namespace simdevice {

namespace {

/// Yields seeds; the numbers come from the launches' generators.
class SeedGenerator final : public at::CPUGeneratorImpl {
 public:
  explicit SeedGenerator(int device) {
    device_ = device_at(device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  SeedGenerator* clone_impl() const override {
    auto* copy = new SeedGenerator(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<SeedGenerator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(int device) {
  static const std::vector<at::Generator>& all = []() -> const std::vector<at::Generator>& {
    auto* generators = new std::vector<at::Generator>;
    for (int index = 0; index < runtime().devices(); ++index) generators->push_back(new_generator(index));
    return *generators;
  }();
  return all.at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

at::Generator launch_generator(const std::optional<at::Generator>& given, int device) {
  at::Generator generator = given.has_value() && given->defined() ? *given : default_generator(device);
  if (generator.device().is_cpu()) return generator;
  const std::lock_guard lock(generator.mutex());
  return at::detail::createCPUGenerator(
      static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl())->random64());
}

}  // namespace simdevice
