#include "runtime/executor/backward_halves.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

namespace fold3d::runtime {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// The nodes that can be reached from where a backward begins, and which of them run in the half of the inputs.
class Graph {
 public:
  explicit Graph(const edge_list& roots) {
    for (const Edge& root : roots) number_of(root.function.get());
    for (std::size_t k = 0; k < nodes_.size(); ++k) {  // it grows
      for (const Edge& edge : nodes_[k].node->next_edges()) {
        if (edge.is_valid()) {
          const std::size_t next = number_of(edge.function.get());  // may move nodes_
          nodes_[next].from.push_back(k);
        }
      }
    }
  }

  /// `leaf`, if it is in the graph, gets its gradient in the half of the inputs: so all that lead there run in it.
  void aim_at(const Node* leaf) {
    if (const auto found = numbers_.find(leaf); found != numbers_.end()) aim_at(found->second);
  }

  /// Likewise for the leaves beyond nodes where ways part, and that cannot run in halves.
  void aim_past(const std::function<bool(Node&)>& is_rebuilt) {
    for (bool again = true; again;) {
      again = false;
      for (std::size_t k = 0; k < nodes_.size(); ++k) {
        if (!nodes_[k].runs_once && is_parting(k)) nodes_[k].runs_once = must_run_once(*nodes_[k].node, is_rebuilt);
        if (!nodes_[k].runs_once.value_or(false) || !is_parting(k)) continue;
        aim_at_leaves_of(k);
        again = true;
      }
    }
  }

  bool is_aimed(const Node* node) const { return nodes_[numbers_.at(node)].aimed; }

  /// The nodes aimed at that lead to others, too; and with `parting` false those that do not, leaves apart.
  std::vector<c10::intrusive_ptr<Node>> aimed_nodes(bool parting) const {
    std::vector<c10::intrusive_ptr<Node>> found;
    for (std::size_t k = 0; k < nodes_.size(); ++k) {
      if (nodes_[k].aimed && !is_leaf(*nodes_[k].node) && is_parting(k) == parting) {
        found.push_back(nodes_[k].node->getptr());
      }
    }
    return found;
  }

 private:
  struct Entry {
    Node* node;
    std::vector<std::size_t> from{};
    bool aimed = false;
    std::optional<bool> runs_once{};  // known for nodes where ways part
  };

  static bool is_leaf(const Node& node) {
    for (const Edge& edge : node.next_edges()) {
      if (edge.is_valid()) return false;
    }
    return true;
  }

  /// torch's own functions compute the gradients they are asked for, and nothing else. It would show if others ran
  /// twice.
  static bool must_run_once(Node& node, const std::function<bool(Node&)>& is_rebuilt) {
    return dynamic_cast<torch::autograd::TraceableFunction*>(&node) == nullptr || !node.tensor_pre_hooks().empty() ||
           !node.retains_grad_hooks().empty() || !node.pre_hooks().empty() || !node.post_hooks().empty() ||
           is_rebuilt(node);
  }

  std::size_t number_of(Node* node) {
    const auto [found, is_new] = numbers_.try_emplace(node, nodes_.size());
    if (is_new) nodes_.push_back({node});
    return found->second;
  }

  void aim_at(std::size_t number) {
    std::vector<std::size_t> todo{number};
    while (!todo.empty()) {
      Entry& entry = nodes_[todo.back()];
      todo.pop_back();
      if (entry.aimed) continue;
      entry.aimed = true;
      todo.insert(todo.end(), entry.from.begin(), entry.from.end());
    }
  }

  bool is_parting(std::size_t number) const {
    if (!nodes_[number].aimed) return false;
    for (const Edge& edge : nodes_[number].node->next_edges()) {
      if (edge.is_valid() && !is_aimed(edge.function.get())) return true;
    }
    return false;
  }

  void aim_at_leaves_of(std::size_t number) {
    std::vector<std::size_t> todo{number};
    std::vector<bool> seen(nodes_.size(), false);
    while (!todo.empty()) {
      const std::size_t k = todo.back();
      todo.pop_back();
      if (is_leaf(*nodes_[k].node)) aim_at(k);
      for (const Edge& edge : nodes_[k].node->next_edges()) {
        if (!edge.is_valid()) continue;
        const std::size_t next = numbers_.at(edge.function.get());
        if (seen[next] || (k == number && nodes_[next].aimed)) continue;
        seen[next] = true;
        todo.push_back(next);
      }
    }
  }

  std::vector<Entry> nodes_;
  std::unordered_map<const Node*, std::size_t> numbers_;
};

/// Keeps what arrives at a node.
class Keep final : public torch::autograd::FunctionPreHook {
 public:
  explicit Keep(std::shared_ptr<variable_list> kept) : kept_(std::move(kept)) {}
  variable_list operator()(const variable_list& gradients) override { return *kept_ = gradients; }

 private:
  std::shared_ptr<variable_list> kept_;
};

/// A node at which the ways to weights part from those to inputs.
struct Parting {
  c10::intrusive_ptr<Node> node;
  edge_list to_weights;  // by output of the node, as its edges
  std::shared_ptr<variable_list> arrived = std::make_shared<variable_list>();
};

void run_engine(const BackwardStart& start, bool keep_graph) {
  Engine::get_default_engine().execute(start.roots, start.gradients, keep_graph, /*create_graph=*/false,
                                       /*accumulate_grad=*/true);
}

void add(BackwardStart& start, Edge root, at::Tensor gradient) {
  start.roots.push_back(std::move(root));
  start.gradients.push_back(std::move(gradient));
}

}  // namespace

void run_backward(BackwardStart start) {
  if (!start.roots.empty()) run_engine(start, /*keep_graph=*/false);
}

BackwardStart run_input_half(BackwardStart start, const std::vector<at::Tensor>& inputs,
                             const std::function<bool(Node&)>& is_rebuilt) {
  Graph graph(start.roots);
  edge_list leaves;  // alive as long as the graph is looked at
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) leaves.push_back(torch::autograd::impl::gradient_edge(input));
  }
  for (const Edge& leaf : leaves) graph.aim_at(leaf.function.get());
  graph.aim_past(is_rebuilt);

  BackwardStart input_half;
  BackwardStart weight_half;
  for (std::size_t k = 0; k < start.roots.size(); ++k) {
    const bool now = graph.is_aimed(start.roots[k].function.get());
    add(now ? input_half : weight_half, start.roots[k], start.gradients[k]);
  }
  start = {};
  if (input_half.roots.empty()) return weight_half;

  // A node computes the gradients for which it has an edge. (Telling the engine what is wanted would do as well, but
  // reentrant checkpoints refuse to run then.)
  const auto done = graph.aimed_nodes(/*parting=*/false);
  std::vector<Parting> partings;
  for (const auto& node : graph.aimed_nodes(/*parting=*/true)) {
    Parting& parting = partings.emplace_back(node, edge_list(node->num_outputs()));
    for (std::size_t k = 0; k < parting.to_weights.size(); ++k) {
      Edge& edge = parting.node->next_edges()[k];
      if (edge.is_valid() && !graph.is_aimed(edge.function.get())) std::swap(edge, parting.to_weights[k]);
    }
    parting.node->add_pre_hook(std::make_unique<Keep>(parting.arrived));
  }
  run_engine(input_half, /*keep_graph=*/true);

  for (const auto& node : done) node->release_variables();
  for (Parting& parting : partings) {
    parting.node->pre_hooks().clear();
    parting.node->next_edges() = std::move(parting.to_weights);
    for (std::size_t k = 0; k < parting.arrived->size(); ++k) {
      at::Tensor& gradient = (*parting.arrived)[k];
      if (gradient.defined()) add(weight_half, Edge(parting.node, static_cast<std::uint32_t>(k)), std::move(gradient));
    }
  }
  return weight_half;
}

}  // namespace fold3d::runtime
