#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/plan/group.h"

namespace fold3d::core {

/// What else was tried: the best of a number of segments and a schedule.
struct RunnerUp {
  int segments = 1;
  std::string schedule;
  int group_size = 0;
  SyncKind kind = SyncKind::kEarly;
  bool fits = true;
  std::int64_t step_ns = 0;
};

/// What a search says of one of its jobs.
struct PlanFound {
  std::optional<Candidate> best;     ///< none: bounds say that another job has a faster one, or there is none
  bool fits = false;                 ///< `best` keeps to the job's limits
  std::int64_t least_ns = 0;         ///< no plan of the job takes less
  std::string refused;               ///< why no plan is possible
  std::vector<RunnerUp> runners_up;  ///< the best first, the one of `best` left out
};

struct PlanProgress {
  std::int64_t looked_at = 0;  ///< pairs of segments and schedule, of all jobs
  std::int64_t of = 0;
  std::int64_t simulated = 0;  ///< plans
  std::string doing;
  int job = -1;  ///< of the best plan so far; -1: none fits yet
  std::int64_t best_ns = 0;
  RunnerUp best;
};

/// Calls its argument with 0 ... n-1, in any order, perhaps at the same time; returns when all are done. What one
/// throws is thrown again.
using ForEach = std::function<void(std::size_t n, const std::function<void(std::size_t)>& body)>;

/// One after the other.
void one_by_one(std::size_t n, const std::function<void(std::size_t)>& body);

struct SearchOptions {
  std::int64_t beat_ns = kNever;  ///< a step of what is known already; jobs that cannot be faster are left out
  ForEach each = one_by_one;
  std::function<void(const PlanProgress&)> progress = {};  ///< told between rounds; what it throws ends the search
};

/// The plans with the shortest predicted step in `space`, of each job. The result depends on the arguments alone: not
/// on how `each` spreads the work.
///
/// Best first: pairs of a number of segments and a schedule, of all jobs together, in the order of what their
/// computing and their bubble take at least; none whose bound says that it cannot be faster by 0.1 %. Then closer
/// around what is fast, and where memory is short, made to fit. Of plans that are equal to 0.1 % the one that spares
/// less, splits no backward, has fewer segments, and rather early gathers than zero1. Where nothing fits, the one that
/// needs least. Throws std::invalid_argument for a job that makes no sense.
std::vector<PlanFound> search_plans(const std::vector<PlanJob>& jobs, const PlanSpace& space,
                                    const SearchOptions& options);

/// What Fold3D chooses (section IV): the most segments with which PP.sync and DP.sync together take no longer than the
/// computing that hides them, whole segments as buckets, all micro-batches at once.
Candidate heuristic_plan(const PlanJob& job, const PlanSpace& space);

}  // namespace fold3d::core
