// Which nodes of autograd's graph have hooks on the tensors that they saved; only Python can ask.
#pragma once

#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <typeindex>
#include <unordered_map>
#include <vector>

namespace fold3d::bindings {

/// Whether somebody else's hooks packed it; those of a StashBatch make nothing anew.
inline bool is_hooked(const pybind11::handle& saved) {
  if (saved.is_none()) return false;
  if (!pybind11::isinstance<pybind11::sequence>(saved)) {
    const pybind11::object hook = saved.attr("unpack_hook");
    return !hook.is_none() && !hook.is(pybind11::module_::import("fold3d._C").attr("unpack_saved"));
  }
  for (const pybind11::handle one : saved) {
    if (is_hooked(one)) return true;
  }
  return false;
}

/// Whether torch.autograd.graph.saved_tensors_hooks packed what `node` saved: checkpoints recompute it when it is read.
/// Takes the GIL. `node` must be one of torch's own functions: it is asked for what it shows as "_raw_saved_...".
inline bool has_saved_tensor_hooks(torch::autograd::Node& node) {
  static std::unordered_map<std::type_index, std::vector<std::string>> names_of;  // the GIL guards it
  const pybind11::gil_scoped_acquire gil;
  const auto object = pybind11::reinterpret_steal<pybind11::object>(torch::autograd::functionToPyObject(node.getptr()));
  const auto [names, is_new] = names_of.try_emplace(typeid(node));
  if (is_new) {
    for (const pybind11::handle name : pybind11::reinterpret_steal<pybind11::list>(PyObject_Dir(object.ptr()))) {
      const auto text = name.cast<std::string>();
      if (text.starts_with("_raw_saved_")) names->second.push_back(text);
    }
  }
  for (const std::string& name : names->second) {
    if (is_hooked(object.attr(name.c_str()))) return true;
  }
  return false;
}

}  // namespace fold3d::bindings
