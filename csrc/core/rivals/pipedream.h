#pragma once

#include <cstdint>
#include <vector>

namespace fold3d::core::rivals {

/// A model as a row of layers that may be cut between any two.
struct LayerRow {
  std::vector<double> seconds;     ///< of each layer: forward and backward of one input
  std::vector<double> sent_bytes;  ///< what crosses the cut after each layer for one input; gradients are as large
  std::vector<double> parameter_bytes;
};

/// `components` of the level below (of the first level: workers), joined by links of `bandwidth` bytes per second.
struct MachineLevel {
  int components = 1;
  double bandwidth = 0;
};

/// What summing W bytes of gradients over m replicas costs on links of bandwidth B.
enum class AllReduceCost : std::uint8_t {
  kRing,  ///< 2 (m - 1) / m W / B: what a ring takes
  kText,  ///< 2 (m - 1) W / B, as the recurrence is printed
};

/// Layers [first, end), each input of which is computed by one of `replicas` workers in turn.
struct ReplicatedStage {
  int first = 0;
  int end = 0;
  int replicas = 1;
};

struct PipedreamPlan {
  double seconds = 0;  ///< of the slowest stage, for one input
  std::vector<ReplicatedStage> stages;
};

/// PipeDream's partitioner (Narayanan et al. 2019, section 3.1; Narayanan's dissertation, section 2.4.1), on all
/// workers of all `levels`, the innermost first:
///
///   T^k(i..j, m) = 1/m max(A^{k-1}(i..j, m_{k-1}), all-reduce of the weights of i..j over m)
///   A^k(i..j, m) = min(T^k(i..j, m), min over s, m' of max(A^k(i..s, m - m'), 2 a_s / B_k, T^k(s+1..j, m')))
///   A^0(i..j, 1) = sum of the layers' seconds
///
/// The first case of the second minimum, one stage for all, is missing in the text, whose results need it. Of plans
/// that take as long the one with fewer stages. Exact dynamic programme, O(layers^3 components^2) a level; pure. Throws
/// std::invalid_argument for a row without layers or of different lengths, a negative or infinite number, a level
/// without components, and a bandwidth that is not positive.
PipedreamPlan pipedream(const LayerRow& row, const std::vector<MachineLevel>& levels, AllReduceCost cost);

}  // namespace fold3d::core::rivals
