#include "core/plan/layout.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>

#include "core/partition.h"

namespace fold3d::core {
namespace {

std::size_t at(int number) { return static_cast<std::size_t>(number); }

bool parts_head(const PlanJob& job, const std::pair<int, int>& range) {
  const std::vector<LayerRead> layers = job.reads.of_chunk(range);
  std::set<int> of_body;
  for (std::size_t k = 0; k + 1 < layers.size(); ++k) {
    of_body.insert(layers[k].parameters.begin(), layers[k].parameters.end());
  }
  const std::vector<int>& of_head = layers.back().parameters;
  return std::none_of(of_head.begin(), of_head.end(), [&](int parameter) { return of_body.count(parameter) > 0; });
}

double sum_of(const std::vector<double>& values, int first, int end) {
  double sum = 0;
  for (int k = first; k < end; ++k) sum += values[at(k)];
  return sum;
}

/// How many groups come nearest to `time` without more than that; at least 1.
int take(const std::vector<double>& groups, double time, int most) {
  int taken = 1;
  while (taken < most && sum_of(groups, 0, taken + 1) <= time * 1.001) ++taken;
  return taken;
}

/// The first group of every segment, where the times are nearest to growing evenly.
std::vector<int> growing(const std::vector<double>& groups, int segments, const Shares& shares) {
  const double step = (shares.last - shares.first) / std::max(1, segments - 1);
  std::vector<double> wanted;
  for (int k = 0; k < segments; ++k) wanted.push_back(shares.first + step * k);
  const int count = static_cast<int>(groups.size());
  const double scale = sum_of(groups, 0, count) / sum_of(wanted, 0, segments);
  std::vector<int> begins = {0};
  double passed = 0, due = 0;
  for (int k = 1; k < segments; ++k) {
    due += scale * wanted[at(k - 1)];
    int begin = begins.back() + 1;
    passed += groups[at(begin - 1)];
    while (begin < count - (segments - k) && std::abs(passed + groups[at(begin)] - due) <= std::abs(passed - due)) {
      passed += groups[at(begin++)];
    }
    begins.push_back(begin);
  }
  return begins;
}

/// The first unit of every segment, and the number of units. Whole groups of pp units, so that a segment of equal
/// blocks can be cut evenly; what is left over goes to the last group.
std::vector<int> segment_borders(const std::vector<double>& costs, int pp, int segments, const Shares& shares) {
  const int units = static_cast<int>(costs.size()), count = units / pp;
  std::vector<double> groups;
  for (int k = 0; k < count; ++k) groups.push_back(sum_of(costs, pp * k, pp * (k + 1)));
  groups.back() += sum_of(costs, pp * count, units);
  std::vector<int> begins;
  if (shares.grow) {
    begins = growing(groups, segments, shares);
  } else {
    // With two segments one share tells the sizes of both.
    const double first = shares.first, last = segments > 2 ? shares.last : 1;
    const int inner = segments - (first != 1) - (last != 1);
    if (inner < 1) {
      begins = partition(groups, segments);
    } else {
      const double average = sum_of(groups, 0, count) / (inner + (first != 1 ? first : 0) + (last != 1 ? last : 0));
      const int head = first != 1 ? take(groups, first * average, count - segments + 1) : 0;
      const std::vector<double> reversed(groups.rbegin(), groups.rend());
      const int tail = last != 1 ? take(reversed, last * average, count - head - inner) : 0;
      if (head > 0) begins.push_back(0);
      const std::vector<double> middle(groups.begin() + head, groups.end() - tail);
      for (const int begin : partition(middle, inner)) begins.push_back(head + begin);
      if (tail > 0) begins.push_back(count - tail);
    }
  }
  for (int& begin : begins) begin *= pp;
  begins.push_back(units);
  return begins;
}

/// Relative times of the stages, in the order in which a segment passes them; empty: all are equal.
std::vector<double> times_of_segment(const PlanJob& job, int segment) {
  std::vector<double> found;
  if (job.stage_times.empty()) return found;
  const Shape shape = job.shape(job.pp * (segment + 1));
  for (int place = 0; place < job.pp; ++place) {
    found.push_back(job.time_of_stage(shape.stage_of(segment * job.pp + place)));
  }
  return found;
}

/// A chunk's layers: times of a forward and a backward, bytes of gradients.
struct Timed {
  std::vector<double> forward, backward;
  std::vector<std::int64_t> bytes;
};

std::vector<std::vector<BucketCost>> buckets_of_chunks(const std::vector<Timed>& chunks, std::int64_t least_bytes) {
  std::vector<std::vector<BucketCost>> found;
  for (const Timed& chunk : chunks) {
    auto& buckets = found.emplace_back();
    for (const auto& [first, end] : cut_buckets(chunk.bytes, least_bytes)) {
      buckets.push_back({sum_of(chunk.forward, first, end), sum_of(chunk.backward, first, end),
                         std::accumulate(chunk.bytes.begin() + first, chunk.bytes.begin() + end, std::int64_t{0})});
    }
  }
  return found;
}

}  // namespace

Activations activations_of(const std::vector<LayerBytes>& layers, std::int64_t arriving) {
  std::int64_t before = 0, forward = 0, backward = 0;
  for (const LayerBytes& layer : layers) {
    forward = std::max(forward, before + layer.forward);
    backward = std::max(backward, before + layer.backward);
    before += layer.saved;
  }
  // What the last layer hands on is kept as the inputs of the next chunk, and counted there.
  const std::int64_t own = before - (!layers.empty() && arriving > 0 ? layers.back().outputs : 0);
  return {own, forward, std::max(own, backward - arriving)};
}

Activations with_head_done(const std::vector<LayerBytes>& layers, std::int64_t ends) {
  const Activations body = activations_of({layers.begin(), layers.end() - 1}, ends);
  const Activations whole = activations_of(layers, 0);
  const std::int64_t before_head = whole.saved - layers.back().saved;
  return {body.saved + ends, std::max(whole.forward, before_head + layers.back().backward), body.backward + ends};
}

LayerBytes recomputed(const LayerBytes& layer, std::int64_t handed_on, std::int64_t sums) {
  return {handed_on + sums, handed_on, layer.forward, std::max(layer.backward, layer.forward) + sums};
}

std::vector<std::pair<int, int>> cut_buckets(const std::vector<std::int64_t>& layer_bytes, std::int64_t least_bytes) {
  const bool negative = std::any_of(layer_bytes.begin(), layer_bytes.end(), [](auto size) { return size < 0; });
  if (least_bytes < 0 || negative) {
    throw std::invalid_argument("bucket_bytes=" + std::to_string(least_bytes) + ", or the bytes of " +
                                std::to_string(layer_bytes.size()) + " layers: none may be negative");
  }
  std::vector<std::pair<int, int>> buckets;
  const int count = static_cast<int>(layer_bytes.size());
  int first = 0;
  std::int64_t size = 0;
  for (int layer = 0; layer < count; ++layer) {
    size += layer_bytes[at(layer)];
    if (size < std::max<std::int64_t>(1, least_bytes)) continue;
    buckets.emplace_back(first, layer + 1);
    first = layer + 1;
    size = 0;
  }
  if (first == count) return buckets;
  if (!buckets.empty()) {
    buckets.back().second = count;
  } else if (size > 0) {
    buckets.emplace_back(0, count);
  }
  return buckets;
}

Ranges cut(const PlanJob& job, int segments, const Shares& shares) {
  const int units = static_cast<int>(job.starts.size()), pp = job.pp, total = job.blocks();
  if (segments < 1 || segments > units / pp) {
    const std::string why = job.closed_because.empty() ? "" : " (" + job.closed_because + ")";
    throw std::invalid_argument("segments=" + std::to_string(segments) + " times pp=" + std::to_string(pp) +
                                " chunks are asked for, but the model can be cut at " + std::to_string(units - 1) +
                                " places only" + why +
                                "; lower segments or pp, or name smaller blocks with the setting `blocks`");
  }
  std::vector<double> blocks;
  for (int block = 0; block < total; ++block) {
    blocks.push_back(job.forward[at(block + 1)] + job.backward[at(block + 1)]);
  }
  blocks.front() += job.forward.front() + job.backward.front();
  blocks.back() += job.forward.back() + job.backward.back();
  std::vector<double> costs;
  for (int unit = 0; unit < units; ++unit) {
    costs.push_back(sum_of(blocks, job.starts[at(unit)], unit + 1 < units ? job.starts[at(unit + 1)] : total));
  }
  const std::vector<int> borders = segment_borders(costs, pp, segments, shares);
  std::vector<int> begins;
  for (std::size_t k = 0; k + 1 < borders.size(); ++k) {
    const std::vector<double> mine(costs.begin() + borders[k], costs.begin() + borders[k + 1]);
    for (const int offset : partition(mine, pp, times_of_segment(job, static_cast<int>(k))))
      begins.push_back(job.starts[at(borders[k] + offset)]);
  }
  Ranges ranges;
  for (std::size_t k = 0; k < begins.size(); ++k) {
    ranges.emplace_back(begins[k], k + 1 < begins.size() ? begins[k + 1] : total);
  }
  return ranges;
}

std::int64_t Layout::largest_message() const {
  return *std::max_element(activation_bytes.begin(), activation_bytes.end());
}

int Layout::buckets_of(int stage, int pp) const {
  const Shape shape{pp, chunks() / pp, 1, style};
  std::size_t count = 0;
  for (int segment = 0; segment < shape.segments; ++segment)
    count += buckets[at(shape.chunk_of(segment, stage))].size();
  return static_cast<int>(count);
}

Layout layout_of(const PlanJob& job, const Ranges& ranges, std::int64_t bucket_bytes, const Spared& spared) {
  return layouts_of(job, ranges, {bucket_bytes}, spared).front();
}

std::vector<Layout> layouts_of(const PlanJob& job, const Ranges& ranges, const std::vector<std::int64_t>& sizes,
                               const Spared& spared) {
  Layout made;
  made.ranges = ranges;
  made.style = job.style;
  made.spared = spared;
  const int count = static_cast<int>(ranges.size());
  const std::vector<Choice> choices = spared.of_chunks(count);
  std::vector<int> blocks;
  for (const auto& [first, end] : ranges) blocks.push_back(end - first);
  const auto again = spared.recomputed_places(blocks, job.shape(count));
  std::vector<Timed> timed;
  std::vector<LayerBytes> needs;
  std::vector<std::vector<LayerBytes>> needs_of;
  int head = 0;  // the last chunk's last layer
  std::vector<int> of_head;
  for (const std::vector<LayerRead>& layers : job.reads.completed(ranges, job.pp, job.style)) {
    const std::size_t chunk = timed.size();
    Timed& mine = timed.emplace_back();
    needs.clear();
    double forward = 0, backward = 0, forward_tp = 0, backward_tp = 0;
    std::int64_t sums = 0, weights = 0, trained = 0, largest = 0, gradients = 0;
    const double slower = job.time_of_stage(job.shape(count).stage_of(static_cast<int>(chunk)));
    for (const auto& [number, parameters] : layers) {
      const int place = number - 1 - ranges[chunk].first;
      const bool is_again = place >= 0 && place < blocks[chunk] && again[chunk][at(place)];
      const std::int64_t summed = job.sums.empty() ? 0 : job.sums[at(number)];
      double its_backward = job.backward[at(number)];
      LayerBytes bytes = job.layers[at(number)];
      if (is_again) {
        its_backward += job.forward[at(number)] - (job.exposed_forward.empty() ? 0 : job.exposed_forward[at(number)]);
        bytes = recomputed(bytes, job.activation_bytes[at(number - 1)], summed);
      }
      const int inside = choices[chunk].inside;
      if (inside >= 0 && at(inside) < job.inside.size()) {
        its_backward += job.inside[at(inside)].seconds[at(number)];
        bytes = job.inside[at(inside)].layers[at(number)];
      }
      std::int64_t size = 0;
      for (const int parameter : parameters) {
        const std::int64_t gradient = job.gradient_bytes[at(parameter)];
        size += gradient;
        weights += job.parameter_bytes[at(parameter)];
        trained += gradient > 0 ? job.parameter_bytes[at(parameter)] : 0;
        largest = std::max(largest, gradient);
      }
      mine.forward.push_back(slower * job.forward[at(number)]);
      mine.backward.push_back(slower * its_backward);
      mine.bytes.push_back(size);
      needs.push_back(bytes);
      forward += job.forward[at(number)];
      backward += its_backward;
      forward_tp += job.exposed_forward.empty() ? 0 : job.exposed_forward[at(number)];
      backward_tp += job.exposed_backward.empty() ? 0 : job.exposed_backward[at(number)];
      sums += summed;
      gradients += size;
      head = number;
      of_head = parameters;
    }
    // Waiting for TP.sync is the links', whatever computes.
    made.forward.push_back(slower * (forward - forward_tp) + forward_tp);
    made.backward.push_back(slower * (backward - backward_tp) + backward_tp);
    made.forward_tp.push_back(forward_tp);
    made.backward_tp.push_back(backward_tp);
    made.kept.push_back(sums);
    made.parameter_bytes.push_back(weights);
    made.trainable_bytes.push_back(trained);
    made.largest_gradient.push_back(largest);
    made.update.push_back(slower * static_cast<double>(gradients) * job.update_seconds);
    made.activation_bytes.push_back(job.activation_bytes[at(std::max(0, ranges[chunk].second - 1))]);
    needs_of.push_back(needs);
  }
  for (int chunk = 0; chunk < count; ++chunk) {
    const std::int64_t arriving = chunk + 1 < count ? made.activation_bytes[at(chunk)] : 0;
    made.activations.push_back(activations_of(needs_of[at(chunk)], arriving));
  }
  made.parts_head = parts_head(job, ranges.back());
  if (made.parts_head) {
    made.parted = with_head_done(needs_of.back(), job.activation_bytes.back());
    made.head = job.time_of_stage(job.shape(count).stage_of(count - 1)) * job.backward[at(head)];
  }
  for (const int parameter : of_head) {
    if (job.gradient_bytes[at(parameter)] > 0) made.head_gradient_bytes += job.parameter_bytes[at(parameter)];
  }
  if (!spared.offloaded(count).empty()) {
    const std::vector<bool> whole = spared.without_graph(count);
    for (int chunk = 0; chunk < count; ++chunk) {
      const std::int64_t inputs = chunk > 0 ? made.activation_bytes[at(chunk - 1)] : 0;
      const bool parted = made.parts_head && chunk + 1 == count;
      const std::int64_t saved = parted ? made.parted.saved : made.activations[at(chunk)].saved;
      made.stash_bytes.push_back(inputs + (whole[at(chunk)] ? made.kept[at(chunk)] : saved));
    }
  }
  std::vector<Layout> found;
  for (const std::int64_t size : sizes) {
    auto buckets = buckets_of_chunks(timed, size);
    if (!found.empty() && found.back().buckets == buckets) continue;
    made.bucket_bytes = size;
    made.buckets = std::move(buckets);
    found.push_back(made);
  }
  return found;
}

}  // namespace fold3d::core
