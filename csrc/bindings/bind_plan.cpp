#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/signals.h"
#include "core/plan/search.h"

namespace py = pybind11;

namespace fold3d::bindings {
namespace {

using core::Candidate;
using core::GatherOrder;
using core::LayerBytes;
using core::Layout;
using core::PlanFound;
using core::PlanJob;
using core::PlanProgress;
using core::PlanSpace;
using core::Ranges;
using core::RunnerUp;
using core::Spared;
using core::StagePeak;

using BytesTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using ChoiceTuple = std::tuple<bool, int, int>;
using ModeNames = std::vector<std::vector<std::string>>;

std::vector<LayerBytes> layers_of(const std::vector<BytesTuple>& layers) {
  std::vector<LayerBytes> found;
  for (const auto& [saved, outputs, forward, backward] : layers) found.push_back({saved, outputs, forward, backward});
  return found;
}

core::Modes modes_of(const ModeNames& names) {
  core::Modes modes;
  for (const auto& stage : names) {
    auto& mine = modes.emplace_back();
    for (const std::string& name : stage) mine.push_back(core::parse_way(name));
  }
  return modes;
}

ModeNames names_of(const core::Modes& modes) {
  ModeNames names;
  for (const auto& stage : modes) {
    auto& mine = names.emplace_back();
    for (const core::Way way : stage) mine.emplace_back(core::to_string(way));
  }
  return names;
}

std::string text_of(core::SyncKind kind) {
  switch (kind) {
    case core::SyncKind::kEarly:
      return "early";
    case core::SyncKind::kMixed:
      return "mixed";
    case core::SyncKind::kZero1:
      return "zero1";
    case core::SyncKind::kSerial:
      return "serial";
  }
  return "";
}

const std::vector<std::string> kLeaves = {"none", "boundaries", "activations"};

Spared make_spared(const std::vector<ChoiceTuple>& again, const std::string& leaves, int percent) {
  Spared made;
  made.again.clear();
  for (const auto& [full, every, inside] : again) made.again.push_back({full, every, inside});
  const auto found = std::find(kLeaves.begin(), kLeaves.end(), leaves);
  if (found == kLeaves.end() || made.again.empty()) {
    throw std::invalid_argument("offload is '" + leaves + "'; it must be none, boundaries or activations");
  }
  made.leaves = static_cast<Spared::Leaves>(found - kLeaves.begin());
  made.percent = percent;
  return made;
}

/// Runs the bodies on so many threads.
core::ForEach on_threads(int threads) {
  return [threads](std::size_t n, const std::function<void(std::size_t)>& body) {
    std::atomic<std::size_t> next{0};
    std::mutex lock;
    std::exception_ptr failure;
    const auto work = [&] {
      for (std::size_t k = next++; k < n; k = next++) {
        try {
          body(k);
        } catch (...) {
          const std::lock_guard guard(lock);
          if (!failure) failure = std::current_exception();
        }
      }
    };
    std::vector<std::thread> others;
    const std::size_t count = std::min(n, static_cast<std::size_t>(std::max(1, threads)));
    for (std::size_t k = 1; k < count; ++k) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    if (failure) std::rethrow_exception(failure);
  };
}

void bind_job(py::module_& module) {
  py::class_<Spared>(module, "PlanSpared", "What is computed again and what leaves the device; immutable.")
      .def(py::init(&make_spared), py::arg("again"), py::arg("leaves"), py::arg("percent"))
      .def_property_readonly("again",
                             [](const Spared& spared) {
                               std::vector<ChoiceTuple> found;
                               for (const auto& one : spared.again) found.emplace_back(one.full, one.every, one.inside);
                               return found;
                             })
      .def_property_readonly("leaves",
                             [](const Spared& one) { return kLeaves.at(static_cast<std::size_t>(one.leaves)); })
      .def_readonly("percent", &Spared::percent);
  py::class_<core::LayerReads>(module, "LayerReads", "Which parameters a model's layers read, by number; immutable.")
      .def(py::init([](std::vector<std::vector<int>> reads, std::vector<std::vector<int>> unread,
                       std::vector<int> before, std::vector<int> by_all) {
             if (reads.empty() || reads.size() != unread.size()) {
               throw std::invalid_argument("reads and unread have one entry for each block and one for the epilogue");
             }
             return core::LayerReads{std::move(reads), std::move(unread), std::move(before), std::move(by_all)};
           }),
           py::arg("reads"), py::arg("unread"), py::arg("before"), py::arg("by_all"))
      .def(
          "completed",
          [](const core::LayerReads& reads, const Ranges& ranges, int pp, const std::string& style) {
            std::vector<std::vector<std::pair<int, std::vector<int>>>> chunks;
            for (auto& layers : reads.completed(ranges, pp, core::parse_style(style))) {
              auto& chunk = chunks.emplace_back();
              for (auto& layer : layers) chunk.emplace_back(layer.number, std::move(layer.parameters));
            }
            return chunks;
          },
          py::arg("ranges"), py::arg("pp"), py::arg("style"));
  py::class_<PlanJob>(module, "PlanJob", "What the planner is told about a training job: numbers only.")
      .def(py::init<>())
      .def_readwrite("dp", &PlanJob::dp)
      .def_readwrite("pp", &PlanJob::pp)
      .def_readwrite("micro_batches", &PlanJob::micro_batches)
      .def_property(
          "style", [](const PlanJob& job) { return core::to_string(job.style); },
          [](PlanJob& job, const std::string& style) { job.style = core::parse_style(style); })
      .def_readwrite("starts", &PlanJob::starts)
      .def_readwrite("closed_because", &PlanJob::closed_because)
      .def_readwrite("reads", &PlanJob::reads)
      .def_readwrite("gradient_bytes", &PlanJob::gradient_bytes)
      .def_readwrite("parameter_bytes", &PlanJob::parameter_bytes)
      .def_readwrite("forward", &PlanJob::forward)
      .def_readwrite("backward", &PlanJob::backward)
      .def_readwrite("exposed_forward", &PlanJob::exposed_forward)
      .def_readwrite("exposed_backward", &PlanJob::exposed_backward)
      .def_readwrite("sums", &PlanJob::sums)
      .def(
          "set_layers", [](PlanJob& job, const std::vector<BytesTuple>& layers) { job.layers = layers_of(layers); },
          py::arg("layers"))
      .def(
          "add_inside",
          [](PlanJob& job, const std::vector<BytesTuple>& layers, std::vector<double> seconds) {
            job.inside.push_back({layers_of(layers), std::move(seconds)});
          },
          py::arg("layers"), py::arg("seconds"))
      .def_readwrite("activation_bytes", &PlanJob::activation_bytes)
      .def_readwrite("update_seconds", &PlanJob::update_seconds)
      .def_readwrite("optimizer_bytes", &PlanJob::optimizer_bytes)
      .def_readwrite("update_bytes", &PlanJob::update_bytes)
      .def_readwrite("updates_together", &PlanJob::updates_together)
      .def_readwrite("offload_optimizer", &PlanJob::offload_optimizer)
      .def_readwrite("bandwidth", &PlanJob::bandwidth)
      .def_readwrite("pp_bandwidth", &PlanJob::pp_bandwidth)
      .def_readwrite("forward_links", &PlanJob::forward_links)
      .def_readwrite("backward_links", &PlanJob::backward_links)
      .def_readwrite("stage_times", &PlanJob::stage_times)
      .def_readwrite("toll", &PlanJob::toll)
      .def_readwrite("pp_latency", &PlanJob::pp_latency)
      .def_readwrite("hop_latency", &PlanJob::hop_latency)
      .def_readwrite("slice_bytes", &PlanJob::slice_bytes)
      .def_readwrite("preempt", &PlanJob::preempt)
      .def_readwrite("action_seconds", &PlanJob::action_seconds)
      .def_readwrite("bucket_seconds", &PlanJob::bucket_seconds)
      .def_readwrite("copy_bandwidth", &PlanJob::copy_bandwidth)
      .def_readwrite("gradient_share", &PlanJob::gradient_share)
      .def_readwrite("gradient_delay", &PlanJob::gradient_delay)
      .def_readwrite("flush", &PlanJob::flush)
      .def_readwrite("weight_versions", &PlanJob::weight_versions)
      .def_readwrite("hosts", &PlanJob::hosts)
      .def_readwrite("memory_limit", &PlanJob::memory_limit)
      .def_readwrite("pool_limit", &PlanJob::pool_limit)
      .def_readwrite("pool_is_elsewhere", &PlanJob::pool_is_elsewhere)
      .def_readwrite("may_split", &PlanJob::may_split)
      .def(
          "cut",
          [](const PlanJob& job, int segments, double first, double last, bool grow) {
            job.check();
            return core::cut(job, segments, {first, last, grow});
          },
          py::arg("segments"), py::kw_only(), py::arg("first") = 1.0, py::arg("last") = 1.0, py::arg("grow") = false)
      .def(
          "layout",
          [](const PlanJob& job, const Ranges& ranges, std::int64_t bucket_bytes, const Spared& spared) {
            job.check();
            return core::layout_of(job, ranges, bucket_bytes, spared);
          },
          py::arg("ranges"), py::arg("bucket_bytes"), py::arg("spared"))
      .def(
          "run",
          [](const PlanJob& job, const Layout& layout, const std::string& schedule, int group_size,
             std::optional<core::Schedule> given, const ModeNames& modes, int early_gathers,
             const std::optional<GatherOrder>& gather_order, bool breakdown) {
            core::Order order{schedule, group_size, given ? std::make_shared<core::Schedule>(*given) : nullptr};
            core::Programs programs(job, std::move(order), layout.chunks() / job.pp);
            auto made = programs.run(job, layout, modes_of(modes),
                                     {early_gathers, gather_order ? &*gather_order : nullptr, breakdown, true});
            return std::pair(std::move(made.step), std::move(made.memory));
          },
          py::arg("layout"), py::arg("schedule"), py::arg("group_size"), py::arg("given"), py::arg("modes"),
          py::arg("early_gathers"), py::arg("gather_order"), py::arg("breakdown"),
          py::call_guard<py::gil_scoped_release>());
}

void bind_layout(py::module_& module) {
  using BucketTuple = std::tuple<double, double, std::int64_t>;
  py::class_<Layout>(module, "PlanLayout", "What every chunk and bucket of a cut costs; immutable.")
      .def_readonly("ranges", &Layout::ranges)
      .def_readonly("bucket_bytes", &Layout::bucket_bytes)
      .def_readonly("forward", &Layout::forward)
      .def_readonly("backward", &Layout::backward)
      .def_readonly("forward_tp", &Layout::forward_tp)
      .def_readonly("backward_tp", &Layout::backward_tp)
      .def_readonly("update", &Layout::update)
      .def_readonly("activation_bytes", &Layout::activation_bytes)
      .def_readonly("stash_bytes", &Layout::stash_bytes)
      .def_readonly("parameter_bytes", &Layout::parameter_bytes)
      .def_readonly("head", &Layout::head)
      .def_property_readonly("buckets",
                             [](const Layout& layout) {
                               std::vector<std::vector<BucketTuple>> chunks;
                               for (const auto& buckets : layout.buckets) {
                                 auto& chunk = chunks.emplace_back();
                                 for (const auto& one : buckets)
                                   chunk.emplace_back(one.forward, one.backward, one.bytes);
                               }
                               return chunks;
                             })
      .def("buckets_of", &Layout::buckets_of, py::arg("stage"), py::arg("pp"));
  const auto bytes_of = [](const core::Activations& one) { return std::tuple(one.saved, one.forward, one.backward); };
  module.def(
      "activations_of",
      [bytes_of](const std::vector<BytesTuple>& layers, std::int64_t arriving) {
        return bytes_of(core::activations_of(layers_of(layers), arriving));
      },
      py::arg("layers"), py::arg("arriving"));
  module.def(
      "with_head_done",
      [bytes_of](const std::vector<BytesTuple>& layers, std::int64_t ends) {
        if (layers.empty())
          throw std::invalid_argument("with_head_done takes the layers of a chunk, the head included");
        return bytes_of(core::with_head_done(layers_of(layers), ends));
      },
      py::arg("layers"), py::arg("ends"));
  module.def(
      "recomputed",
      [](const BytesTuple& layer, std::int64_t handed_on, std::int64_t sums) {
        const LayerBytes made = core::recomputed(layers_of({layer}).front(), handed_on, sums);
        return BytesTuple(made.saved, made.outputs, made.forward, made.backward);
      },
      py::arg("layer"), py::arg("handed_on"), py::arg("sums"));
  module.def("cut_buckets", &core::cut_buckets, py::arg("layer_bytes"), py::arg("least_bytes"));
}

void bind_found(py::module_& module) {
  py::class_<StagePeak>(module, "PlanPeak", "The most that a rank of a stage has in a step, in bytes.")
      .def_readonly("bytes", &StagePeak::bytes)
      .def_readonly("uses", &StagePeak::uses)
      .def_readonly("pool", &StagePeak::pool)
      .def_readonly("host", &StagePeak::host);
  py::class_<Candidate>(module, "PlanCandidate", "A plan, and what the simulator says of it.")
      .def_property_readonly("layout", [](const Candidate& one) { return *one.layout; })
      .def_property_readonly("spared", [](const Candidate& one) { return one.layout->spared; })
      .def_property_readonly("schedule", [](const Candidate& one) { return one.order.name; })
      .def_property_readonly("group_size", [](const Candidate& one) { return one.order.group_size; })
      .def_property_readonly("modes", [](const Candidate& one) { return names_of(one.modes); })
      .def_property_readonly("kind", [](const Candidate& one) { return text_of(core::kind_of(one.modes)); })
      .def_readonly("early_gathers", &Candidate::early_gathers)
      .def_readonly("step_ns", &Candidate::step_ns)
      .def_readonly("peaks", &Candidate::peaks)
      .def_readonly("gather_order", &Candidate::gather_order);
  py::class_<RunnerUp>(module, "RunnerUp", "The best of a number of segments and a schedule.")
      .def_readonly("segments", &RunnerUp::segments)
      .def_readonly("schedule", &RunnerUp::schedule)
      .def_readonly("group_size", &RunnerUp::group_size)
      .def_property_readonly("kind", [](const RunnerUp& one) { return text_of(one.kind); })
      .def_readonly("fits", &RunnerUp::fits)
      .def_readonly("step_ns", &RunnerUp::step_ns);
  py::class_<PlanFound>(module, "PlanFound", "What a search says of one of its jobs.")
      .def_readonly("best", &PlanFound::best)
      .def_readonly("fits", &PlanFound::fits)
      .def_readonly("least_ns", &PlanFound::least_ns)
      .def_readonly("refused", &PlanFound::refused)
      .def_readonly("runners_up", &PlanFound::runners_up);
  py::class_<PlanProgress>(module, "PlanProgress", "How far a search is.")
      .def_readonly("looked_at", &PlanProgress::looked_at)
      .def_readonly("of", &PlanProgress::of)
      .def_readonly("simulated", &PlanProgress::simulated)
      .def_readonly("doing", &PlanProgress::doing)
      .def_readonly("job", &PlanProgress::job)
      .def_readonly("best_ns", &PlanProgress::best_ns)
      .def_readonly("best", &PlanProgress::best);
}

void bind_search(py::module_& module) {
  py::class_<PlanSpace>(module, "PlanSpace", "What is fixed about a plan, and what is to be tried of the rest.")
      .def(py::init<>())
      .def_readwrite("segments", &PlanSpace::segments)
      .def_readwrite("ranges", &PlanSpace::ranges)
      .def_readwrite("schedule", &PlanSpace::schedule)
      .def_readwrite("group_size", &PlanSpace::group_size)
      .def(
          "give",
          [](PlanSpace& space, const core::Schedule& given) { space.given = std::make_shared<core::Schedule>(given); },
          py::arg("schedule"))
      .def(
          "set_ways",
          [](PlanSpace& space, const std::vector<std::string>& ways, bool mixes) {
            space.ways.clear();
            for (const std::string& way : ways) space.ways.push_back(core::parse_way(way));
            space.mixes = mixes;
          },
          py::arg("ways"), py::arg("mixes"))
      .def(
          "set_modes", [](PlanSpace& space, const ModeNames& modes) { space.modes = modes_of(modes); },
          py::arg("modes"))
      .def_readwrite("bucket_bytes", &PlanSpace::bucket_bytes)
      .def(
          "set_spared",
          [](PlanSpace& space, const Spared& fixed, bool again_is_free, bool leaving_is_free) {
            space.sparing = {fixed, again_is_free, leaving_is_free};
          },
          py::arg("fixed"), py::arg("again_is_free"), py::arg("leaving_is_free"))
      .def(
          "heuristic", [](const PlanSpace& space, const PlanJob& job) { return core::heuristic_plan(job, space); },
          py::arg("job"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "search_plans",
      [](const std::vector<PlanJob>& jobs, const PlanSpace& space, std::optional<std::int64_t> beat_ns, int threads,
         const std::function<void(const PlanProgress&)>& progress) {
        core::SearchOptions options{.beat_ns = beat_ns.value_or(core::kNever),
                                    .each = on_threads(threads),
                                    .progress = [&progress](const PlanProgress& state) {
                                      handle_signals();
                                      const py::gil_scoped_acquire gil;
                                      if (progress) progress(state);
                                    }};
        const py::gil_scoped_release free;
        return core::search_plans(jobs, space, options);
      },
      py::arg("jobs"), py::arg("space"), py::kw_only(), py::arg("beat_ns"), py::arg("threads"), py::arg("progress"));
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_job(module);
  bind_layout(module);
  bind_found(module);
  bind_search(module);
}

}  // namespace fold3d::bindings
