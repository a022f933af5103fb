// Which operators of torch run on this thread: what a block that was proved on one micro-batch does on the next ones.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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

/// Sequences of three operators that follow each other, with the dimensions that they are told, as numbers that are the
/// same in every process. Only what Python's code calls itself counts, not what operators call. Products of matrices
/// are one operator, because a rank may compute them by another one; exchanges of fold3d's and random numbers are left
/// out, because ranks draw and exchange otherwise than one process.
///
/// One code with loops has few such sequences, however often the loops run.
class OperatorRun {
 public:
  /// `known`: sequences that are not noted.
  explicit OperatorRun(std::shared_ptr<const NumberSet> known) : known_(std::move(known)) {}

  /// An operator has been called.
  void ran(std::uint64_t op, const char* name);

  /// Sequences that are not known, and the name of the last operator of each, in the order in which they came.
  const std::vector<std::pair<std::uint64_t, std::string>>& unknown() const { return unknown_; }

  int level = 0;        ///< calls under way, of operators and of autograd's own functions
  int outermost = 0;    ///< level of the operator that calls the others; 0: none runs
  bool paused = false;  ///< what runs is fold3d's own

 private:
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

/// A product of matrices has been computed in some other way.
void note_product();

}  // namespace fold3d::runtime
