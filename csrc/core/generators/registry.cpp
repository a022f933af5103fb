#include "core/generators/registry.h"

#include <stdexcept>

namespace fold3d::core {

// One line per schedule: the function in generators/<file>.cpp that describes it.
#define FOLD3D_FOR_EACH_SCHEDULE(X) \
  X(gpipe)                          \
  X(one_f_one_b)                    \
  X(kfkb)                           \
  X(shifted_critical_path)          \
  X(zb_h1)                          \
  X(zb_v)                           \
  X(interleaved)                    \
  X(fold)                           \
  X(aiao)

namespace generators {
#define FOLD3D_DECLARE(function) SchedulerInfo function();
FOLD3D_FOR_EACH_SCHEDULE(FOLD3D_DECLARE)
#undef FOLD3D_DECLARE
}  // namespace generators

namespace {

void require_at_least_one(int value, const char* name) {
  if (value < 1) throw std::invalid_argument(std::string(name) + " must be at least 1, got " + std::to_string(value));
}

void check(const SchedulerInfo& info, const Params& params) {
  require_at_least_one(params.shape.pp, "pp");
  require_at_least_one(params.shape.segments, "segments");
  require_at_least_one(params.shape.micro_batches, "micro_batches");
  if (params.group_size < 0) {
    throw std::invalid_argument("group_size must be at least 1, or 0 for the schedule's default, got " +
                                std::to_string(params.group_size));
  }
  const std::string have_no_effect = " has no effect on schedule '" + info.name + "': ";
  if (!info.uses_segments && params.shape.segments != 1) {
    throw std::invalid_argument("segments=" + std::to_string(params.shape.segments) + have_no_effect +
                                "set segments=1 or choose interleaved, fold or aiao");
  }
  if (info.segments != 0 && params.shape.segments != info.segments) {
    throw std::invalid_argument(
        "segments=" + std::to_string(params.shape.segments) + ": schedule '" + info.name +
        "' has another number of chunks on each stage: set segments=" + std::to_string(info.segments));
  }
  if (!info.uses_group_size && params.group_size != 0) {
    throw std::invalid_argument("group_size=" + std::to_string(params.group_size) + have_no_effect +
                                "leave it out or choose schedule 'fold' or 'kfkb'");
  }
  if (!info.uses_turn && !params.turn.empty()) {
    throw std::invalid_argument("turn='" + params.turn + "'" + have_no_effect +
                                "leave it out or choose schedule 'fold'");
  }
}

}  // namespace

std::vector<SchedulerInfo> registry() {
#define FOLD3D_CALL(function) generators::function(),
  return {FOLD3D_FOR_EACH_SCHEDULE(FOLD3D_CALL)};
#undef FOLD3D_CALL
}

Schedule generate(const std::string& name, const Params& params) {
  std::string known;
  for (const SchedulerInfo& info : registry()) {
    if (info.name == name) {
      check(info, params);
      Params checked = params;
      checked.shape.style = params.shape.pp == 1 ? Style::kLoop : info.style;  // one stage has no other
      return info.generate(checked);
    }
    known += (known.empty() ? "" : ", ") + info.name;
  }
  throw std::invalid_argument("unknown schedule '" + name + "': set schedule to one of " + known);
}

}  // namespace fold3d::core
