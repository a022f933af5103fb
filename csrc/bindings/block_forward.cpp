#include "bindings/block_forward.h"

#include <structmember.h>

#include <cstddef>
#include <exception>

namespace py = pybind11;

namespace fold3d::bindings {
namespace {

/// A module's forward that returns what the chunk received if its block is to be skipped, and else calls a function of
/// Python. A type of CPython's own, because a forward is called for every block in front of the chunk, which makes the
/// call itself the cost. Copies and pickles of the module have the forward that it had before.
struct BlockForward {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  PyObject* slot_owner;
  PyObject* otherwise;
  PyObject* original;
  CurrentForward* slot;
  std::uint64_t constant;
  int block;
};

BlockForward* of(PyObject* self) { return reinterpret_cast<BlockForward*>(self); }

PyObject* call(PyObject* self, PyObject* const* args, std::size_t count, PyObject* names) {
  const BlockForward* const forward = of(self);
  if (forward->otherwise == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the forward of a module that is being deleted");
    return nullptr;
  }
  try {
    const CurrentForward& slot = *forward->slot;
    if (forward->block >= 0 && slot.cursor != nullptr && slot.cursor->skip(forward->block, forward->constant)) {
      return Py_NewRef(slot.received.ptr());
    }
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return PyObject_Vectorcall(forward->otherwise, args, count, names);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(of(self)->slot_owner);
  Py_VISIT(of(self)->otherwise);
  Py_VISIT(of(self)->original);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(of(self)->original);
  Py_CLEAR(of(self)->otherwise);  // between runs the slot refers to nothing
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_CLEAR(of(self)->original);
  Py_CLEAR(of(self)->otherwise);
  Py_CLEAR(of(self)->slot_owner);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* itself(PyObject* self, PyObject*) { return Py_NewRef(self); }

PyObject* copied(PyObject* self, PyObject* memo) {
  PyObject* const module = PyImport_ImportModule("copy");
  if (module == nullptr) return nullptr;
  PyObject* const made = PyObject_CallMethod(module, "deepcopy", "OO", of(self)->original, memo);
  Py_DECREF(module);
  return made;
}

PyObject* reduced(PyObject* self, PyObject* protocol) {
  return PyObject_CallMethod(of(self)->original, "__reduce_ex__", "O", protocol);
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(BlockForward, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, offsetof(BlockForward, otherwise), READONLY, "What is called for all other blocks."},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"__copy__", itself, METH_NOARGS, "Shallow copies of modules share everything."},
    {"__deepcopy__", copied, METH_O, "A copy of the forward from before, bound to the copy of the module."},
    {"__reduce_ex__", reduced, METH_O, "The forward from before is pickled in its place."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {
    .name = "fold3d._C.BlockForward",
    .basicsize = sizeof(BlockForward),
    .itemsize = 0,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

py::object block_forward(const py::handle& type, py::object slot, int block, std::uint64_t constant,
                         py::function otherwise, py::function original) {
  CurrentForward* const cursors = &slot.cast<CurrentForward&>();
  auto* const made = reinterpret_cast<PyTypeObject*>(type.ptr());
  PyObject* const self = made->tp_alloc(made, 0);
  if (self == nullptr) throw py::error_already_set();
  BlockForward* const forward = of(self);
  forward->vectorcall = call;
  forward->slot = cursors;
  forward->slot_owner = slot.release().ptr();
  forward->otherwise = otherwise.release().ptr();
  forward->original = original.release().ptr();
  forward->constant = constant;
  forward->block = block;
  return py::reinterpret_steal<py::object>(self);
}

}  // namespace

void bind_block_forward(py::module_& module) {
  py::class_<CurrentForward>(module, "CurrentForward", "The cursor under way, where the blocks' forwards find it.")
      .def(py::init<>())
      .def(
          "begin",
          [](CurrentForward& slot, py::object cursor, py::object received) {
            slot.cursor = &cursor.cast<runtime::ForwardCursor&>();
            slot.keeps = std::move(cursor);
            slot.received = std::move(received);
          },
          py::arg("cursor"), py::arg("received"), "From now on skipped blocks return `received`.")
      .def(
          "end",
          [](CurrentForward& slot) {
            slot.cursor = nullptr;
            slot.received = slot.keeps = py::object();
          },
          "No cursor is under way.");
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  module.attr("BlockForward") = type;
  module.def(
      "block_forward",
      [type](py::object slot, int block, std::uint64_t constant, py::function otherwise, py::function original) {
        return block_forward(type, std::move(slot), block, constant, std::move(otherwise), std::move(original));
      },
      py::arg("slot"), py::arg("block"), py::arg("constant"), py::arg("otherwise"), py::arg("original"),
      "A forward for a module: while the slot's cursor may skip `block` (never where that is negative), it returns "
      "what "
      "the chunk received; else it calls `otherwise`. Copies of the module get `original`, bound to them.");
}

}  // namespace fold3d::bindings
