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

/// The candidates of one job, number of segments and schedule. Not to be used by several threads at once.
class Group {
 public:
  Group(const PlanJob& job, const PlanSpace& space, int segments, Order order);

  int segments() const { return segments_; }
  const Order& order() const { return order_; }
  const PlanJob& job() const { return job_; }
  /// No candidate takes less.
  std::int64_t least_ns() const { return least_ns_; }
  /// A guess at the best one: the even cut, computing and the bubble that every schedule has.
  std::int64_t likely_ns() const { return likely_ns_; }
  /// Whether its backwards are split.
  bool splits() const { return splits_; }
  /// Why there is no such schedule; empty where there is.
  const std::string& refused() const { return refused_; }
  const std::vector<std::unique_ptr<Candidate>>& candidates() const { return candidates_; }
  std::int64_t simulated_actions() const { return simulated_actions_; }

  bool has_limit() const { return job_.memory_limit.has_value() || job_.pool_limit.has_value(); }
  bool has_room(const StagePeak& peak) const;
  bool fits(const Candidate& candidate) const;
  /// The fastest that fits; null where none does.
  const Candidate* fastest() const;

  // Each looks only at what may take less than `cutoff_ns`.

  /// A few cuts, the usual buckets, each way of DP.sync.
  void look(std::int64_t cutoff_ns);
  /// All cuts and buckets, then numbers of early gathers and mixed ways around the fastest. `like`: sparing as it does.
  void look_closely(std::int64_t cutoff_ns, const Spared& like);
  /// Of each way of DP.sync the fastest, whether it fits or not, made to fit: with all blocks computed again ...
  void spare_most(std::int64_t cutoff_ns);
  /// ... and with as little as it takes.
  void spare(std::int64_t cutoff_ns);

  const Candidate& tried(const std::shared_ptr<const Layout>& layout, const Modes& modes, int early_gathers);
  Programs& programs();

 private:
  using Key = std::tuple<Ranges, std::int64_t, std::vector<int>, Modes, int>;
  std::vector<Ranges> cuts(bool all) const;
  std::shared_ptr<const Layout> spared_like(const Candidate& candidate, const Spared& spared);
  std::vector<const Candidate*> fastest_of_ways() const;
  std::vector<Ladder> ladders_of(const Candidate& like) const;
  std::int64_t cutoff_of(std::int64_t cutoff_ns) const;
  void try_ways(const std::shared_ptr<const Layout>& layout, std::int64_t cutoff_ns);
  void try_gathers(const std::shared_ptr<const Layout>& layout);

  const PlanJob& job_;
  const PlanSpace& space_;
  int segments_;
  Order order_;
  bool splits_ = false;
  std::string refused_;
  std::int64_t least_ns_ = 0;
  std::int64_t likely_ns_ = 0;
  std::int64_t simulated_actions_ = 0;
  std::unique_ptr<Programs> programs_;
  std::map<Key, std::size_t> known_;
  std::vector<std::unique_ptr<Candidate>> candidates_;
};

}  // namespace fold3d::core
