#include <torch/library.h>

#include <cstdint>
#include <vector>

#include "simdevice/operators/fallback.h"

namespace simdevice {

namespace {

// torch sends convolutions of devices that it does not know to these two operators.

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_stream(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto arguments = torch::jit::pop(*stack, 10);
  const at::Tensor weight = arguments[2].toTensor();
  const bool transposed = arguments[6].toBool();
  const std::int64_t channels = transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0);
  arguments.insert(arguments.begin() + 3, c10::IValue(std::vector<std::int64_t>{channels}));
  for (auto& argument : arguments) stack->push_back(std::move(argument));
  run_on_stream(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace simdevice
