#include "runtime/collectives/row_collectives.h"

#include <vector>

namespace fold3d::runtime {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// `start(row, rank)` begins a collective. Waits for those of all rows.
template <typename Start>
void for_each_row(c10d::ProcessGroup& group, const at::Tensor& rows, const Start& start) {
  const c10::DeviceType device = rows.device().type();
  const bool in_one_launch = group.getBackend(device)->supportsCoalescing();
  std::vector<WorkPtr> works;
  if (in_one_launch) group.startCoalescing(device);
  try {
    for (int rank = 0; rank < group.getSize(); ++rank) {
      std::vector<at::Tensor> row{rows[rank]};
      works.push_back(start(row, rank));
    }
  } catch (...) {
    if (in_one_launch) group.endCoalescing(device);  // else this thread's later launches would wait for its end
    throw;
  }
  if (in_one_launch) works.assign({group.endCoalescing(device)});
  for (const WorkPtr& work : works) work->wait();
}

}  // namespace

void reduce_scatter_rows(c10d::ProcessGroup& group, const at::Tensor& rows) {
  for_each_row(group, rows, [&](std::vector<at::Tensor>& row, int rank) {
    c10d::ReduceOptions options;
    options.rootRank = rank;
    return group.reduce(row, options);
  });
}

void all_gather_rows(c10d::ProcessGroup& group, const at::Tensor& rows) {
  for_each_row(group, rows, [&](std::vector<at::Tensor>& row, int rank) {
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    return group.broadcast(row, options);
  });
}

}  // namespace fold3d::runtime
