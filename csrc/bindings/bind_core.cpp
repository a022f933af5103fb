#include "bindings/bindings.h"

#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "core/generators/registry.h"
#include "core/ir/action_kinds.h"
#include "core/ir/deps.h"
#include "core/ir/schedule.h"
#include "core/ir/stash.h"
#include "core/ir/timeline.h"
#include "core/ir/versions.h"
#include "core/partition.h"
#include "core/passes/grid.h"
#include "core/passes/lower.h"
#include "core/passes/repeat.h"
#include "core/passes/validate.h"

namespace py = pybind11;

namespace fold3d::bindings {
namespace {

using core::Action;
using core::Kind;
using core::Schedule;
using core::Shape;

void bind_action(py::module_& module) {
  py::enum_<Kind> kind(module, "Kind", "What an action does.");
  for (int k = 0; k < core::kNumKinds; ++k) {
    const core::ActionKind& entry = core::about(static_cast<Kind>(k));
    kind.value(entry.python_name.data(), entry.kind);
  }
  kind.def_property_readonly("text", [](Kind kind) { return std::string(core::to_string(kind)); })
      .def_property_readonly("is_compute", [](Kind kind) { return core::is_compute(kind); });

  py::class_<Action>(module, "Action", "One cell of a schedule; immutable, compared by value.")
      .def(py::init([](int chunk, Kind kind, int micro_batch) { return Action{chunk, kind, micro_batch}; }),
           py::arg("chunk"), py::arg("kind"), py::arg("micro_batch") = -1)
      .def_readonly("chunk", &Action::chunk)
      .def_readonly("kind", &Action::kind)
      .def_readonly("micro_batch", &Action::micro_batch)
      .def_property_readonly("text", [](const Action& a) { return core::to_string(a); })
      .def("__repr__", [](const Action& a) { return core::to_string(a); })
      .def("__hash__",
           [](const Action& a) { return py::hash(py::make_tuple(a.chunk, static_cast<int>(a.kind), a.micro_batch)); })
      .def(py::self == py::self)
      .def(py::self < py::self)
      .def(py::pickle([](const Action& a) { return core::to_string(a); },
                      [](const std::string& text) { return core::parse_action(text); }));
  module.def("parse_action", [](const std::string& text) { return core::parse_action(text); }, py::arg("text"));
}

void bind_schedule(py::module_& module) {
  py::class_<Schedule>(module, "Schedule", "Ordered actions of every rank for one step; immutable, compared by value.")
      .def(py::init([](int pp, int segments, int micro_batches, std::vector<std::vector<Action>> ranks,
                       const std::string& style) {
             return Schedule{Shape{pp, segments, micro_batches, core::parse_style(style)}, std::move(ranks)};
           }),
           py::arg("pp"), py::arg("segments"), py::arg("micro_batches"), py::arg("ranks"), py::arg("style") = "loop")
      .def_property_readonly("pp", [](const Schedule& s) { return s.shape.pp; })
      .def_property_readonly("segments", [](const Schedule& s) { return s.shape.segments; })
      .def_property_readonly("micro_batches", [](const Schedule& s) { return s.shape.micro_batches; })
      .def_property_readonly("ranks", [](const Schedule& s) { return s.ranks; })
      .def_property_readonly("style", [](const Schedule& s) { return core::to_string(s.shape.style); })
      .def_property_readonly("has_comm", [](const Schedule& s) { return core::has_comm(s); })
      .def_property_readonly("has_backward", [](const Schedule& s) { return core::has_backward(s); })
      .def("reduce_order", &core::reduce_order, py::arg("stage"),
           "Chunks of a stage in the order of their REDUCE_GRAD.")
      .def("csv", [](const Schedule& s) { return core::to_csv(s); })
      .def("__repr__", [](const Schedule& s) { return "<Schedule " + core::to_string(s.shape) + ">"; })
      .def("__hash__", [](const Schedule& s) { return py::hash(py::str(core::to_csv(s))); })
      .def(py::self == py::self)
      .def(py::pickle(
          [](const Schedule& s) {
            return py::make_tuple(s.shape.pp, s.shape.segments, s.shape.micro_batches, s.ranks,
                                  core::to_string(s.shape.style));
          },
          [](const py::tuple& t) {
            return Schedule{Shape{t[0].cast<int>(), t[1].cast<int>(), t[2].cast<int>(),
                                  core::parse_style(t[4].cast<std::string>())},
                            t[3].cast<std::vector<std::vector<Action>>>()};
          }));
  module.def("parse_csv", [](const std::string& text) { return core::parse_csv(text); }, py::arg("text"));
  module.def("grid", [](const Schedule& s) { return core::grid(s); }, py::arg("schedule"));
  module.def(
      "lower",
      [](const Schedule& s, bool reduce, std::vector<bool> recompute, std::vector<bool> offload, int prefetch_distance,
         bool lazy, double offload_share) {
        return core::lower(s, {.reduce = reduce,
                               .recompute = std::move(recompute),
                               .offload = std::move(offload),
                               .offload_share = offload_share,
                               .lazy = lazy,
                               .prefetch_distance = prefetch_distance});
      },
      py::arg("schedule"), py::arg("reduce"), py::arg("recompute") = std::vector<bool>{},
      py::arg("offload") = std::vector<bool>{}, py::arg("prefetch_distance") = 2, py::arg("lazy") = false,
      py::arg("offload_share") = 1.0);
  module.def("validate", &core::validate, py::arg("schedule"), py::arg("forward_only") = false);
  module.def(
      "without_flush",
      [](const std::string& name, int pp, int segments, int micro_batches) {
        core::Repeating lists = core::without_flush(name, Shape{pp, segments, micro_batches});
        return std::make_tuple(std::move(lists.first), std::move(lists.every), std::move(lists.drain));
      },
      py::arg("name"), py::arg("pp"), py::arg("segments"), py::arg("micro_batches"));
  module.def("by_micro_batch", &core::by_micro_batch, py::arg("pp"), py::arg("steps"));
  module.def(
      "version_of",
      [](const std::string& rule, int pp, int micro_batches, int stage, int micro_batch) {
        return core::version_of(core::parse_version_rule(rule), Shape{pp, 1, micro_batches}, stage, micro_batch);
      },
      py::arg("rule"), py::arg("pp"), py::arg("micro_batches"), py::arg("stage"), py::arg("micro_batch"));
  module.def(
      "live_versions",
      [](const std::string& rule, int pp, int stage) {
        return core::live_versions(core::parse_version_rule(rule), Shape{pp, 1, 1}, stage);
      },
      py::arg("rule"), py::arg("pp"), py::arg("stage"));
  module.def("peak_stash", &core::peak_stash, py::arg("schedule"));
  module.def(
      "validate_room",
      [](const Schedule& s, std::optional<std::int64_t> device, std::optional<std::int64_t> pool,
         std::vector<std::int64_t> stash_bytes, std::vector<std::int64_t> sent_bytes) {
        core::validate_room(s, {device, pool, std::move(stash_bytes), std::move(sent_bytes)});
      },
      py::arg("schedule"), py::arg("device"), py::arg("pool"), py::arg("stash_bytes") = std::vector<std::int64_t>{},
      py::arg("sent_bytes") = std::vector<std::int64_t>{});
  module.def(
      "stash_peaks",
      [](const Schedule& s, const std::vector<std::int64_t>& stash_bytes, const std::vector<std::int64_t>& sent_bytes) {
        std::vector<std::pair<std::int64_t, std::int64_t>> peaks;
        for (const core::StashPeak& peak : core::stash_peaks(s, stash_bytes, sent_bytes))
          peaks.emplace_back(peak.device, peak.pool);
        return peaks;
      },
      py::arg("schedule"), py::arg("stash_bytes") = std::vector<std::int64_t>{},
      py::arg("sent_bytes") = std::vector<std::int64_t>{});
  module.def("least_pools", &core::least_pools, py::arg("schedule"), py::arg("stash_bytes"), py::arg("sent_bytes"));
  module.def(
      "waits_for",
      [](const Schedule& s, const Action& action) {
        return core::waits_for(s.shape, action, core::has_comm(s), core::OptionalActions(s));
      },
      py::arg("schedule"), py::arg("action"));
}

void bind_registry(py::module_& module) {
  py::class_<core::SchedulerInfo>(module, "SchedulerInfo", "One entry of the registry of schedules.")
      .def_readonly("name", &core::SchedulerInfo::name)
      .def_readonly("help", &core::SchedulerInfo::help)
      .def_readonly("uses_segments", &core::SchedulerInfo::uses_segments)
      .def_readonly("uses_group_size", &core::SchedulerInfo::uses_group_size)
      .def_readonly("uses_turn", &core::SchedulerInfo::uses_turn)
      .def_readonly("segments", &core::SchedulerInfo::segments)
      .def("allows", &core::SchedulerInfo::allows, py::arg("segments"))
      .def_property_readonly("style", [](const core::SchedulerInfo& info) { return core::to_string(info.style); });
  module.def("registry", &core::registry);
  module.def(
      "generate",
      [](const std::string& name, int pp, int segments, int micro_batches, int group_size, const std::string& turn) {
        return core::generate(name, {Shape{pp, segments, micro_batches}, group_size, turn});
      },
      py::arg("name"), py::arg("pp"), py::arg("segments"), py::arg("micro_batches"), py::arg("group_size") = 0,
      py::arg("turn") = "");
}

void bind_timeline(py::module_& module) {
  py::class_<core::Span>(module, "Span", "One compute action on the time axis of a step.")
      .def_readonly("action", &core::Span::action)
      .def_readonly("start", &core::Span::start)
      .def_readonly("end", &core::Span::end);
  py::class_<core::Timeline>(module, "Timeline", "When every compute action runs, in the unit of the costs.")
      .def_readonly("ranks", &core::Timeline::ranks)
      .def_readonly("makespan", &core::Timeline::makespan)
      .def_readonly("busy", &core::Timeline::busy)
      .def_property_readonly("bubble", &core::Timeline::bubble);
  module.def(
      "unit_timeline",
      [](const Schedule& s, double forward, double backward, double send) {
        return core::unit_timeline(s, {forward, backward, send});
      },
      py::arg("schedule"), py::arg("forward") = 1.0, py::arg("backward") = 2.0, py::arg("send") = 0.0);
  module.def("partition", &core::partition, py::arg("cost"), py::arg("parts"),
             py::arg("weights") = std::vector<double>{});
}

}  // namespace

void bind_core(py::module_& module) {
  bind_action(module);
  bind_schedule(module);
  bind_registry(module);
  bind_timeline(module);
}

}  // namespace fold3d::bindings
