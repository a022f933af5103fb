#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/plan/candidate.h"
#include "core/plan/sparing.h"

namespace fold3d::core {

/// What is fixed about a plan, and what is to be tried of the rest.
struct PlanSpace {
  std::optional<int> segments;
  std::optional<Ranges> ranges;           ///< segments follow from it
  std::string schedule;                   ///< "": any that is registered
  int group_size = 0;                     ///< 0: any
  std::shared_ptr<const Schedule> given;  ///< the one that `schedule` names, if it is not registered
  std::vector<Way> ways = {Way::kEarly};  ///< of DP.sync, for all buckets
  bool mixes = false;                     ///< some buckets early, the others zero1
  std::optional<Modes> modes;             ///< of each bucket, instead
  std::vector<std::int64_t> bucket_bytes = {0};
  SparingSpace sparing;
};

/// The numbers of segments to try, ascending: all up to 12, then every fourth.
std::vector<int> segments_to_try(const PlanJob& job, const PlanSpace& space);
/// The schedules to try with so many segments, the plainest first.
std::vector<Order> orders_to_try(const PlanJob& job, const PlanSpace& space, int segments);
/// About `count` numbers of early gathers of a stage with so many buckets, evenly spread, and "any" (-1).
std::vector<int> early_gathers_to_try(int buckets, int count);

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

/// What is better by less than this factor is not looked for.
inline constexpr double kWorthLooking = 1.001;

/// So many steps of one replica without DP.sync take as long to simulate as a plan.
inline constexpr std::int64_t kLooksOfAPlan = 4;

/// What all schedules of a job with so many segments have in common.
struct Cuts {
  std::vector<Ranges> ranges;       ///< to be tried, the even one first
  std::size_t usual = 0;            ///< so many of them are tried where nothing is known
  std::int64_t likely_ns = 0;       ///< a guess at a step: the even cut, computing and the bubble of every schedule
  std::int64_t least_ns = 0;        ///< no plan takes less ...
  std::int64_t least_split_ns = 0;  ///< ... likewise, with split backwards
  std::int64_t least_bytes = 0;     ///< no plan needs less on the fullest rank
};

/// Throws std::invalid_argument where the job's model cannot be cut so.
Cuts cuts_of(const PlanJob& job, const PlanSpace& space, int segments);

/// The candidates of one job, number of segments and schedule. Not to be used by several threads at once.
class Group {
 public:
  Group(const PlanJob& job, const PlanSpace& space, int segments, Order order, std::shared_ptr<const Cuts> cuts);

  int segments() const { return segments_; }
  const Order& order() const { return order_; }
  const PlanJob& job() const { return job_; }
  /// No candidate takes less.
  std::int64_t least_ns() const { return splits_ ? cuts_->least_split_ns : cuts_->least_ns; }
  const Cuts& cuts() const { return *cuts_; }
  /// Whether its backwards are split.
  bool splits() const { return splits_; }
  /// Why there is no such schedule; empty where there is.
  const std::string& refused() const { return refused_; }
  const std::vector<std::unique_ptr<Candidate>>& candidates() const { return candidates_; }
  std::int64_t actions_of_a_plan() const { return 2LL * job_.pp * segments_ * job_.micro_batches; }
  /// Simulated, with what was looked at without DP.sync.
  std::int64_t plans() const { return static_cast<std::int64_t>(candidates_.size()) + looks_ / kLooksOfAPlan; }

  bool has_limit() const { return job_.memory_limit.has_value() || job_.pool_limit.has_value(); }
  bool has_room(const StagePeak& peak) const;
  bool fits(const Candidate& candidate) const;
  /// The fastest that fits, of those as fast the one that spares less; null where none does.
  const Candidate* fastest() const;
  /// The shortest step of all candidates, whether they fit or not; kNever where there are none.
  std::int64_t shortest_ns() const;
  /// May any plan fit?
  bool may_fit() const { return !job_.memory_limit || cuts_->least_bytes <= *job_.memory_limit; }

  // Each looks only at what may take less than `cutoff_ns`; `most`: plans, about.

  /// The even cut, the usual buckets, the first way of DP.sync.
  void look(std::int64_t cutoff_ns);
  /// The usual cuts and each way of DP.sync.
  void look_again(std::int64_t cutoff_ns);
  /// All cuts and buckets, then numbers of early gathers and mixed ways around the fastest. `like`: sparing as it does.
  void look_closely(std::int64_t cutoff_ns, const Spared& like, std::size_t most);
  /// Of each way of DP.sync the fastest, whether it fits or not, made to fit: with all blocks computed again ...
  void spare_most(std::int64_t cutoff_ns);
  /// ... and with as little as it takes.
  void spare(std::int64_t cutoff_ns, std::size_t most);

  const Candidate& tried(const std::shared_ptr<const Layout>& layout, const Modes& modes, int early_gathers);
  Programs& programs();

 private:
  using Key = std::tuple<Ranges, std::int64_t, std::vector<int>, Modes, int>;
  std::shared_ptr<const Layout> usual_layout(const Ranges& ranges) const;
  std::shared_ptr<const Layout> spared_like(const Candidate& candidate, const Spared& spared);
  std::vector<const Candidate*> fastest_of_ways() const;
  std::vector<Ladder> ladders_of(const Candidate& like) const;
  void spare_like(const Candidate& like, std::int64_t cutoff_ns, std::int64_t until);
  std::int64_t cutoff_of(std::int64_t cutoff_ns) const;
  void try_ways(const std::shared_ptr<const Layout>& layout, std::int64_t cutoff_ns, bool all = true);
  void try_gathers(const std::shared_ptr<const Layout>& layout);

  const PlanJob& job_;
  const PlanSpace& space_;
  int segments_;
  Order order_;
  std::shared_ptr<const Cuts> cuts_;
  bool splits_ = false;
  std::string refused_;
  std::unique_ptr<Programs> programs_;
  std::map<Key, std::size_t> known_;
  std::vector<std::unique_ptr<Candidate>> candidates_;
  std::int64_t looks_ = 0;
};

}  // namespace fold3d::core
