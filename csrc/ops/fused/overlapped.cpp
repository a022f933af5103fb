#include "ops/fused/overlapped.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <utility>

namespace fold3d::ops {
namespace {

using comm::Share;

constexpr std::int64_t kLeastRows = 32;  // of one call of the library: with fewer it is slow

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

at::Tensor matrix(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

at::Tensor empty_of(const at::Tensor& like, const at::Tensor& right) {
  std::vector<std::int64_t> sizes = like.sizes().vec();
  sizes.back() = right.size(1);
  return at::empty(sizes, right.options().requires_grad(false));
}

/// A sum of products that is computed row by row.
class RowSums {
 public:
  RowSums(const std::vector<Factors>& products, const std::optional<at::Tensor>& addend)
      : whole_(empty_of(products.front().left, products.front().right)), rows_(matrix(whole_)) {
    for (const Factors& one : products) products_.push_back({matrix(one.left), one.right});
    if (addend) addend_ = matrix(*addend);
  }

  const at::Tensor& whole() const { return whole_; }
  std::int64_t rows() const { return rows_.size(0); }
  std::int64_t width() const { return rows_.size(1); }

  void compute(std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    at::Tensor out = rows_.slice(0, begin, end);
    bool is_begun = addend_.has_value();
    if (addend_) out.copy_(addend_->slice(0, begin, end));
    for (const Factors& one : products_) {
      const at::Tensor left = one.left.slice(0, begin, end);
      if (is_begun) {
        out.addmm_(left, one.right);
      } else {
        at::mm_out(out, left, one.right);
      }
      is_begun = true;
    }
  }

 private:
  std::vector<Factors> products_;
  std::optional<at::Tensor> addend_;
  at::Tensor whole_, rows_;
};

/// How the rows of a tensor lie whose dimension is split over the ranks, and how an exchange of it is cut: into one for
/// every few samples, and where these are single ones also into shares of their parts.
class Cut {
 public:
  Cut(TensorGroup& group, at::IntArrayRef sizes, std::int64_t dim, std::size_t bytes)
      : rank_(group.rank()), size_(group.size()), length_(sizes[static_cast<std::size_t>(dim)]) {
    for (std::int64_t d = 0; d + 1 < static_cast<std::int64_t>(sizes.size()); ++d) {
      if (d < dim) samples_ *= sizes[static_cast<std::size_t>(d)];
      if (d > dim) inner_ *= sizes[static_cast<std::size_t>(d)];
    }
    const std::int64_t most = group.cut() == nullptr || bytes == 0 ? 1 : group.cut()->most(bytes);
    const std::int64_t rows = samples_ * length_ * inner_;
    blocks_ = std::clamp<std::int64_t>(std::min(most, rows / kLeastRows), 1, std::max<std::int64_t>(samples_, 1));
    if (blocks_ == samples_) {
      shares_ =
          std::clamp<std::int64_t>(length_ / size_ * inner_ / kLeastRows, 1, std::max<std::int64_t>(most / blocks_, 1));
    }
  }

  std::int64_t samples() const { return samples_; }
  std::int64_t blocks() const { return blocks_; }
  std::int64_t shares() const { return shares_; }
  bool is_one() const { return blocks_ * shares_ == 1; }
  /// Samples of a block.
  std::int64_t begin(std::int64_t block) const { return part_begin(samples_, block, blocks_); }
  /// Rows of what is before a sample.
  std::int64_t rows(std::int64_t samples) const { return samples * length_ * inner_; }
  std::int64_t own_rows() const { return part_length(length_, rank_, size_) * inner_; }
  std::int64_t own_begin() const { return part_begin(length_, rank_, size_) * inner_; }
  Share share(std::int64_t index) const {
    return {.index = static_cast<int>(index), .count = static_cast<int>(shares_)};
  }
  /// Rows of a sample that are a share of a rank's part.
  std::pair<std::int64_t, std::int64_t> rows_of(std::int64_t rank, std::int64_t share) const {
    const std::int64_t length = part_length(length_, rank, size_), begin = part_begin(length_, rank, size_);
    return {(begin + part_begin(length, share, shares_)) * inner_,
            (begin + part_begin(length, share + 1, shares_)) * inner_};
  }

 private:
  const std::int64_t rank_, size_, length_;
  std::int64_t samples_ = 1, inner_ = 1, blocks_ = 1, shares_ = 1;
};

std::size_t bytes_of(const RowSums& sums) {
  return static_cast<std::size_t>(sums.rows() * sums.width()) * sums.whole().element_size();
}

/// [samples, length, ...] of a tensor split along `dim`.
at::Tensor by_samples(const at::Tensor& x, std::int64_t dim) {
  return dim == 0 ? x.unsqueeze(0) : x.flatten(0, dim - 1);
}

/// What an all-reduce sums of a rank's part: consecutive elements, whose first and last row another part may share.
class FlatParts {
 public:
  FlatParts(std::int64_t rows, std::int64_t width, std::int64_t size, std::int64_t shares)
      : rows_(rows), width_(width), size_(size), shares_(shares) {}

  /// Rows of a part that must be there before a share of it travels, of those that none before had. A row that two
  /// parts have in common goes with the first share of the latter.
  std::pair<std::int64_t, std::int64_t> rows_of(std::int64_t part, std::int64_t share) const {
    const std::int64_t begin = share == 0 ? first_row(part) : end_row(part, share - 1);
    return {begin, end_row(part, share)};
  }

 private:
  std::int64_t first_row(std::int64_t part) const {
    return part == size_ ? rows_ : part_begin(rows_ * width_, part, size_) / width_;
  }
  std::int64_t end_row(std::int64_t part, std::int64_t share) const {
    const std::int64_t elements = rows_ * width_, begin = part_begin(elements, part, size_);
    const std::int64_t end = begin + part_begin(part_length(elements, part, size_), share + 1, shares_);
    return std::min(ceil_div(end, width_), first_row(part + 1));
  }

  const std::int64_t rows_, width_, size_, shares_;
};

}  // namespace

at::Tensor weight_gradient(const at::Tensor& x, const at::Tensor& gradient, const at::Tensor& weight) {
  const at::Tensor left = x.reshape_symint({-1, x.sym_size(-1)});
  const at::Tensor right = gradient.reshape_symint({-1, gradient.sym_size(-1)});
  const bool is_transposed = weight.sym_stride(0) == 1 && weight.sym_stride(1) == weight.sym_size(0);
  return is_transposed ? at::mm(right.t(), left).t() : at::mm(left.t(), right);
}

at::Tensor Travelling::get() {
  for (const std::shared_ptr<Started>& one : started_) one->wait();
  if (!result_.defined()) result_ = started_.back()->result();
  started_.clear();
  return result_;
}

Travelling all_reduce_of(TensorGroup& group, const std::vector<Factors>& products,
                         const std::optional<at::Tensor>& addend) {
  RowSums sums(products, addend);
  Travelling total(sums.whole());
  const std::int64_t size = group.size(), rows = sums.rows();
  std::int64_t shares = 1;
  if (group.cut() != nullptr && sums.width() > 0) {
    shares = std::clamp<std::int64_t>(rows / size / kLeastRows, 1, group.cut()->most(bytes_of(sums)));
  }
  if (shares == 1) {
    sums.compute(0, rows);
    total.add(group.all_reduce(sums.whole(), comm::Reduction::kSum, /*in_place=*/true));
    return total;
  }
  const FlatParts parts(rows, sums.width(), size, shares);
  for (std::int64_t share = 0; share < shares; ++share) {
    for (std::int64_t part = 0; part < size; ++part) {
      const auto [begin, end] = parts.rows_of(part, share);
      sums.compute(begin, end);
    }
    total.add(
        group.cut()->all_reduce(sums.whole(), {.index = static_cast<int>(share), .count = static_cast<int>(shares)}));
  }
  return total;
}

Travelling reduce_scatter_of(TensorGroup& group, const std::vector<Factors>& products,
                             const std::optional<at::Tensor>& addend, std::int64_t dim) {
  RowSums sums(products, addend);
  const at::Tensor& whole = sums.whole();
  const Cut cut(group, whole.sizes(), dim, bytes_of(sums));
  if (cut.is_one()) {
    sums.compute(0, sums.rows());
    return Travelling(group.reduce_scatter(whole, dim));
  }
  std::vector<std::int64_t> sizes = whole.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = part_length(whole.size(dim), group.rank(), group.size());
  const at::Tensor made = at::empty(sizes, whole.options());
  Travelling part(made);
  const at::Tensor from = by_samples(whole, dim), to = by_samples(made, dim);
  for (std::int64_t block = 0; block < cut.blocks(); ++block) {
    const std::int64_t begin = cut.begin(block), end = cut.begin(block + 1);
    for (std::int64_t share = 0; share < cut.shares(); ++share) {
      if (cut.shares() == 1) {
        sums.compute(cut.rows(begin), cut.rows(end));
      } else {
        for (std::int64_t rank = 0; rank < group.size(); ++rank) {
          const auto [first, last] = cut.rows_of(rank, share);
          sums.compute(cut.rows(begin) + first, cut.rows(begin) + last);
        }
      }
      part.add(group.cut()->reduce_scatter(from.slice(0, begin, end), 1, to.slice(0, begin, end), cut.share(share)));
    }
  }
  return part;
}

namespace {

/// Products of the rows of one tensor.
class RowProducts {
 public:
  RowProducts(const std::vector<at::Tensor>& rights, const at::Tensor& like) : rights_(rights) {
    for (const at::Tensor& right : rights) wholes_.push_back(empty_of(like, right));
  }

  const std::vector<at::Tensor>& wholes() const { return wholes_; }

  /// `left`: the rows from `begin` on.
  void compute(std::int64_t begin, const at::Tensor& left) {
    if (left.size(0) == 0) return;
    for (std::size_t k = 0; k < rights_.size(); ++k) {
      at::Tensor out = matrix(wholes_[k]).slice(0, begin, begin + left.size(0));
      at::mm_out(out, left, rights_[k]);
    }
  }

 private:
  const std::vector<at::Tensor> rights_;
  std::vector<at::Tensor> wholes_;
};

}  // namespace

Gathered gather_and_multiply(TensorGroup& group, const at::Tensor& x, std::int64_t dim, std::int64_t length,
                             const std::vector<at::Tensor>& rights) {
  const at::Tensor part = x.contiguous();
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = length;
  const at::Tensor like = at::empty(sizes, x.options().requires_grad(false).device(at::kMeta));
  const Cut cut(group, sizes, dim, like.nbytes());
  std::vector<std::shared_ptr<Started>> started;
  at::Tensor whole;
  if (group.cut() == nullptr) {
    started.push_back(group.all_gather(part, dim, length));
  } else {
    whole = at::empty(sizes, x.options().requires_grad(false));
    const at::Tensor from = by_samples(part, dim), to = by_samples(whole, dim);
    for (std::int64_t block = 0; block < cut.blocks(); ++block) {
      const std::int64_t begin = cut.begin(block), end = cut.begin(block + 1);
      for (std::int64_t share = 0; share < cut.shares(); ++share) {
        started.push_back(
            group.cut()->all_gather(from.slice(0, begin, end), 1, to.slice(0, begin, end), cut.share(share)));
      }
    }
  }
  RowProducts products(rights, like);
  const at::Tensor own = matrix(part);
  const auto multiply_own = [&](std::int64_t sample) {
    const std::int64_t begin = sample * cut.own_rows();
    products.compute(cut.rows(sample) + cut.own_begin(), own.slice(0, begin, begin + cut.own_rows()));
  };
  const auto multiply = [&](std::int64_t begin, std::int64_t end) {
    products.compute(begin, matrix(whole).slice(0, begin, end));
  };
  for (std::int64_t block = 0; block < cut.blocks(); ++block) {
    const std::int64_t first = cut.begin(block), last = cut.begin(block + 1);
    // Nothing has arrived yet; later there is something to multiply while the next travels.
    const bool is_own_first = cut.shares() > 1 || (block == 0 && cut.own_rows() >= kLeastRows);
    for (std::int64_t sample = first; is_own_first && sample < last; ++sample) multiply_own(sample);
    for (std::int64_t share = 0; share < cut.shares(); ++share) {
      Started& one = *started[static_cast<std::size_t>(block * cut.shares() + share)];
      one.wait();
      if (!whole.defined()) whole = one.result();
      if (!is_own_first) {
        multiply(cut.rows(first), cut.rows(last));
        continue;
      }
      for (std::int64_t sample = first; sample < last; ++sample) {
        for (std::int64_t rank = 0; rank < group.size(); ++rank) {
          if (rank == group.rank()) continue;
          const auto [begin, end] = cut.rows_of(rank, share);
          multiply(cut.rows(sample) + begin, cut.rows(sample) + end);
        }
      }
    }
  }
  return {.whole = whole, .products = products.wholes()};
}

}  // namespace fold3d::ops
