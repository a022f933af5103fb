#include "core/rivals/pipedream.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

namespace fold3d::core::rivals {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// Sums of intervals.
class Prefix {
 public:
  explicit Prefix(const std::vector<double>& values) : sums_(values.size() + 1, 0) {
    std::partial_sum(values.begin(), values.end(), sums_.begin() + 1);
  }
  double of(int first, int end) const { return sums_[at(end)] - sums_[at(first)]; }

 private:
  std::vector<double> sums_;
};

/// A^k of one level for all numbers of components: of all intervals of layers, on the `top` of those that begin the
/// row.
class Level {
 public:
  /// `below`: null: the workers themselves.
  Level(const LayerRow& row, const MachineLevel& machines, AllReduceCost cost, const Level* below, bool top)
      : layers_(static_cast<int>(row.seconds.size())),
        machines_(machines),
        cost_(cost),
        below_(below),
        seconds_(row.seconds),
        parameters_(row.parameter_bytes),
        sent_(row.sent_bytes),
        cells_(at(layers_ * layers_ * machines.components)) {
    for (int length = 1; length <= layers_; ++length) {
      for (int first = 0; first + length <= (top ? length : layers_); ++first) {
        for (int m = 1; m <= machines_.components; ++m) solve(first, first + length, m);
      }
    }
  }

  double whole(int first, int end) const { return cell(first, end, machines_.components).seconds; }

  /// Adds the stages of the best pipeline of [first, end) on all components, each as often as `copies` say.
  void add_stages(int first, int end, int copies, std::vector<ReplicatedStage>& stages) const {
    add_stages(first, end, machines_.components, copies, stages);
  }

 private:
  struct Cell {
    double seconds = 0;
    int last_first = 0;  // first layer of the last stage
    int last_m = 0;      // components of the last stage
  };

  const Cell& cell(int first, int end, int m) const {
    return cells_[at((first * layers_ + end - 1) * machines_.components + m - 1)];
  }

  /// T^k: one stage, replicated over m components.
  double replicated(int first, int end, int m) const {
    const double compute = below_ == nullptr ? seconds_.of(first, end) : below_->whole(first, end);
    const double trips = 2.0 * (m - 1) / (cost_ == AllReduceCost::kRing ? m : 1);
    return std::max(compute, trips * parameters_.of(first, end) / machines_.bandwidth) / m;
  }

  void solve(int first, int end, int m) {
    Cell best{replicated(first, end, m), first, m};
    for (int cut = first + 1; cut < end; ++cut) {
      const double transfer = 2 * sent_[at(cut - 1)] / machines_.bandwidth;
      for (int last_m = 1; last_m < m && transfer < best.seconds; ++last_m) {
        const double seconds = std::max({cell(first, cut, m - last_m).seconds, transfer, replicated(cut, end, last_m)});
        if (seconds < best.seconds) best = {seconds, cut, last_m};
      }
    }
    cells_[at((first * layers_ + end - 1) * machines_.components + m - 1)] = best;
  }

  void add_stages(int first, int end, int m, int copies, std::vector<ReplicatedStage>& stages) const {
    const Cell& best = cell(first, end, m);
    if (best.last_first > first) add_stages(first, best.last_first, m - best.last_m, copies, stages);
    if (below_ == nullptr) {
      stages.push_back({best.last_first, end, copies * best.last_m});
    } else {
      below_->add_stages(best.last_first, end, copies * best.last_m, stages);
    }
  }

  int layers_;
  MachineLevel machines_;
  AllReduceCost cost_;
  const Level* below_;
  Prefix seconds_, parameters_;
  std::vector<double> sent_;
  std::vector<Cell> cells_;
};

void check(const LayerRow& row, const std::vector<MachineLevel>& levels) {
  const auto reject = [](const std::string& what) { throw std::invalid_argument("PipeDream's planner: " + what); };
  if (row.seconds.empty()) reject("the model has no layer");
  for (const auto* values : {&row.seconds, &row.sent_bytes, &row.parameter_bytes}) {
    if (values->size() != row.seconds.size()) {
      reject("there are times of " + std::to_string(row.seconds.size()) + " layers and bytes of " +
             std::to_string(values->size()));
    }
    for (const double value : *values) {
      if (!(value >= 0 && std::isfinite(value))) reject("a layer costs " + std::to_string(value));
    }
  }
  if (levels.empty()) reject("there is no level of machines");
  for (const MachineLevel& level : levels) {
    if (level.components < 1) reject("a level has " + std::to_string(level.components) + " components");
    if (!(level.bandwidth > 0)) reject("the bandwidth of a level is " + std::to_string(level.bandwidth));
  }
}

}  // namespace

PipedreamPlan pipedream(const LayerRow& row, const std::vector<MachineLevel>& levels, AllReduceCost cost) {
  check(row, levels);
  std::vector<std::unique_ptr<Level>> solved;
  for (const MachineLevel& level : levels) {
    const Level* below = solved.empty() ? nullptr : solved.back().get();
    solved.push_back(std::make_unique<Level>(row, level, cost, below, solved.size() + 1 == levels.size()));
  }
  const int layers = static_cast<int>(row.seconds.size());
  PipedreamPlan plan{solved.back()->whole(0, layers), {}};
  solved.back()->add_stages(0, layers, 1, plan.stages);
  return plan;
}

}  // namespace fold3d::core::rivals
