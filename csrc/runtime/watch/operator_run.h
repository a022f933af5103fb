// Which operators of torch run on this thread: what a block that was proved on one micro-batch does on the next ones.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/watch/origins.h"

namespace fold3d::runtime {

/// A set of numbers, with one probe for most questions.
class NumberSet {
 public:
  NumberSet() : slots_(64, 0) {}
  bool contains(std::uint64_t number) const;
  /// Returns whether it was new.
  bool add(std::uint64_t number);

 private:
  std::vector<std::uint64_t> slots_;  // 0 is free
  std::size_t count_ = 0;
};

/// Where the results of an operator come from.
struct Results {
  Origin origin;
  bool differ = false;  ///< whether each one's origin is one of its own
  bool writes = false;  ///< whether arguments that it returns come from it
};

/// Sequences of three operators that follow each other, with the dimensions that they are told, and operators with the
/// origins of their tensors, all as numbers that are the same in every process. Only what Python's code calls itself
/// counts, not what operators call. Products of matrices are one operator, because a rank may compute them by another
/// one; exchanges of fold3d's and random numbers are left out, because ranks draw and exchange otherwise than one
/// process. What they return comes from where their argument does; so do casts and copies, which some calls do not
/// need.
///
/// One code with loops has few such numbers, however often the loops run.
class OperatorRun {
 public:
  /// `known`: numbers that are not noted.
  explicit OperatorRun(std::shared_ptr<const NumberSet> known) : known_(std::move(known)) {}

  /// The code is given a tensor: an argument, a parameter, a buffer. The first name that one gets counts.
  /// `bit`: of `Origin::given`, from 1 to 63.
  void given(const at::Tensor& tensor, std::uint64_t name, unsigned bit);

  /// An operator has been called. `sources`: of what (`Operands::sources`).
  void ran(std::uint64_t op, std::uint64_t sources, const char* name);

  /// Numbers that are not known, and of each the name of its operator, the last one of a sequence, in the order in
  /// which they came.
  const std::vector<std::pair<std::uint64_t, std::string>>& unknown() const { return unknown_; }

  int level = 0;        ///< calls under way, of operators and of autograd's own functions
  int outermost = 0;    ///< level of the operator that calls the others; 0: none runs
  bool paused = false;  ///< what runs is fold3d's own

  Origins origins;
  std::optional<Results> results;  ///< of the outermost operator; none: nobody knows where they come from

 private:
  /// Returns whether it is not known.
  bool note(std::uint64_t number, const char* name, const char* what);

  std::shared_ptr<const NumberSet> known_;
  NumberSet noted_;
  std::vector<std::pair<std::uint64_t, std::string>> unknown_;
  std::uint64_t last_ = 1, before_ = 1;
};

/// Notes operators of this thread in `run` from now on, null: nowhere. Returns where they were noted.
std::shared_ptr<OperatorRun> swap_operator_run(std::shared_ptr<OperatorRun> run);

/// Whether what this thread runs from now on is fold3d's own. Returns what it was.
bool pause_operators(bool pauses);

/// What this thread runs is fold3d's own as long as this lives: copies of what a graph saves, say.
class PausedOperators {
 public:
  PausedOperators() : before_(pause_operators(true)) {}
  ~PausedOperators() { pause_operators(before_); }
  PausedOperators(const PausedOperators&) = delete;
  PausedOperators& operator=(const PausedOperators&) = delete;

 private:
  const bool before_;
};

/// A product of matrices has been computed in some other way, of the first three of `operands` that there are.
void note_product(const at::Tensor& result, const std::vector<std::optional<at::Tensor>>& operands);

/// `result` stands for `source`: it comes from where that does.
void same_origin(const at::Tensor& result, const at::Tensor& source);

}  // namespace fold3d::runtime
