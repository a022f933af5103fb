#include "bindings/bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "core/rivals/pipedream.h"

namespace py = pybind11;

namespace fold3d::bindings {

void bind_rivals(py::module_& module) {
  module.def(
      "pipedream",
      [](std::vector<double> seconds, std::vector<double> sent_bytes, std::vector<double> parameter_bytes,
         const std::vector<std::pair<int, double>>& levels, bool as_text) {
        std::vector<core::rivals::MachineLevel> machines;
        for (const auto& [components, bandwidth] : levels) machines.push_back({components, bandwidth});
        const auto cost = as_text ? core::rivals::AllReduceCost::kText : core::rivals::AllReduceCost::kRing;
        core::rivals::PipedreamPlan plan;
        {
          const py::gil_scoped_release release;
          plan = core::rivals::pipedream({std::move(seconds), std::move(sent_bytes), std::move(parameter_bytes)},
                                         machines, cost);
        }
        std::vector<std::tuple<int, int, int>> stages;
        for (const core::rivals::ReplicatedStage& stage : plan.stages) {
          stages.emplace_back(stage.first, stage.end, stage.replicas);
        }
        return std::make_pair(plan.seconds, stages);
      },
      py::arg("seconds"), py::arg("sent_bytes"), py::arg("parameter_bytes"), py::arg("levels"), py::arg("as_text"),
      "(seconds of the slowest stage for one input, stages as (first layer, end, replicas)); `levels`: (components, "
      "bytes per second), the innermost first; `as_text`: all-reduces as the text prints them, else as rings cost.");
}

}  // namespace fold3d::bindings
