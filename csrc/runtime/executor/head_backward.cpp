#include "runtime/executor/head_backward.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_set>
#include <utility>

namespace fold3d::runtime {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

using Nodes = std::unordered_set<const Node*>;

Edge edge_of(const at::Tensor& tensor) { return torch::autograd::impl::gradient_edge(tensor); }

bool is_leaf(const Node& node) {
  for (const Edge& edge : node.next_edges()) {
    if (edge.is_valid()) return false;
  }
  return true;
}

/// All nodes that lead to `ends`.
Nodes body_of(const edge_list& ends) {
  Nodes body;
  std::vector<const Node*> todo;
  const auto visit = [&](const Edge& edge) {
    if (edge.is_valid() && body.insert(edge.function.get()).second) todo.push_back(edge.function.get());
  };
  for (const Edge& end : ends) visit(end);
  while (!todo.empty()) {
    const Node* const node = todo.back();
    todo.pop_back();
    for (const Edge& edge : node->next_edges()) visit(edge);
  }
  return body;
}

/// The nodes from `root` to the body, which `root` is no part of.
std::vector<Node*> head_of(Node* root, const Nodes& body) {
  std::vector<Node*> head{root};
  Nodes seen{root};
  for (std::size_t k = 0; k < head.size(); ++k) {  // it grows
    for (const Edge& edge : head[k]->next_edges()) {
      Node* const next = edge.function.get();
      if (next != nullptr && !body.contains(next) && seen.insert(next).second) head.push_back(next);
    }
  }
  return head;
}

/// Stands for the body while the head's backward runs: keeps the gradients that would have gone there.
class Border final : public Node {
 public:
  Border() : Node(/*sequence_nr=*/0) {}

  /// Takes the place of `edge`, which becomes one to here.
  void stand_for(Edge& edge) {
    std::size_t number = 0;
    while (number < edges_.size() && edges_[number] != edge) ++number;
    if (number == edges_.size()) {
      add_input_metadata(undefined_input{});
      std::construct_at(&mutable_input_metadata(number), edge.function->input_metadata(edge.input_nr));
      edges_.push_back(edge);
    }
    edge = Edge(getptr(), static_cast<std::uint32_t>(number));
  }

  /// Where gradients would have gone on, and those that came.
  BackwardStart take() {
    BackwardStart start;
    for (std::size_t k = 0; k < gradients_.size(); ++k) {
      if (!gradients_[k].defined()) continue;
      start.roots.push_back(std::move(edges_[k]));
      start.gradients.push_back(std::move(gradients_[k]));
    }
    return start;
  }

 private:
  variable_list apply(variable_list&& gradients) override {
    gradients_ = std::move(gradients);
    return {};
  }

  edge_list edges_;
  variable_list gradients_;
};

}  // namespace

std::optional<BackwardStart> run_head_backward(const at::Tensor& loss, const std::vector<at::Tensor>& ends,
                                               const std::vector<at::Tensor>& inputs,
                                               const std::function<bool(Node&)>& is_rebuilt) {
  edge_list of_ends, of_inputs;  // leaves live as long as somebody holds them
  for (const at::Tensor& end : ends) {
    if (end.requires_grad()) of_ends.push_back(edge_of(end));
  }
  Nodes may_wait;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !input.requires_grad()) continue;
    of_inputs.push_back(edge_of(input));
    may_wait.insert(of_inputs.back().function.get());
  }
  const Edge root = edge_of(loss);
  const Nodes body = body_of(of_ends);
  if (body.contains(root.function.get())) return std::nullopt;

  const std::vector<Node*> head = head_of(root.function.get(), body);
  std::vector<Edge*> crossing;
  for (Node* const node : head) {
    const bool is_torchs_own = dynamic_cast<torch::autograd::TraceableFunction*>(node) != nullptr;
    if (is_torchs_own && is_rebuilt(*node)) return std::nullopt;
    for (Edge& edge : node->next_edges()) {
      const Node* const next = edge.function.get();
      if (next == nullptr || !body.contains(next)) continue;
      if (is_leaf(*next) && !may_wait.contains(next)) return std::nullopt;
      crossing.push_back(&edge);
    }
  }
  const auto border = c10::make_intrusive<Border>();
  for (Edge* const edge : crossing) border->stand_for(*edge);
  run_backward({{root}, {at::ones_like(loss)}});
  return border->take();
}

}  // namespace fold3d::runtime
