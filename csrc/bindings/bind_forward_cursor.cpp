#include "bindings/bindings.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>

#include "core/random/seed_chain.h"
#include "runtime/skip/forward_cursor.h"

namespace py = pybind11;

namespace fold3d::bindings {

void bind_forward_cursor(py::module_& module) {
  using runtime::ForwardCursor;
  py::class_<ForwardCursor>(module, "ForwardCursor",
                            "One forward of the model as one chunk: blocks passed, seeds on the way.")
      .def(py::init<int, std::optional<std::uint64_t>, std::vector<at::Generator>, std::vector<std::uint64_t>>(),
           py::arg("lo"), py::arg("seed"), py::arg("generators"), py::arg("constants") = std::vector<std::uint64_t>(),
           "`lo`: the chunk's first block. `seed`: the chain's first, given to the generators at once; None: they are "
           "left alone. `constants`: of the ends of the blocks, by which seeds are known ahead.")
      .def("skip_from", &ForwardCursor::skip_from, py::arg("block"),
           "Blocks before `block` are none that skip() passes.")
      .def("skip", &ForwardCursor::skip, py::arg("block"), py::arg("constant"),
           "Passes a block in front of the chunk and reseeds as after it; False if anything is unusual.")
      .def("enter", &ForwardCursor::enter, py::arg("block"), "Passes a block; False if it is not the next one.")
      .def("begin_module", &ForwardCursor::begin_module, py::arg("constant"),
           "Reseeds; False inside of another module.")
      .def("end_module", &ForwardCursor::end_module, py::arg("constant"), "Reseeds, where the chain moves on.")
      .def("leave_module", &ForwardCursor::leave_module, "It ends with an exception.")
      .def_property_readonly("position", &ForwardCursor::position, "The next block.")
      .def_property_readonly("with_grad", &ForwardCursor::with_grad, "Whether the forward records for a backward.")
      .def_property_readonly("has_drawn", &ForwardCursor::has_drawn, "Whether anything was drawn since it began.");
  module.def("is_between", &core::is_between, py::arg("seed"), "Whether `seed` is of a chain, between two modules.");
  module.def("next_seed", &core::next_seed, py::arg("seed"), py::arg("constant"),
             "The seed that follows `seed` in the chain, behind the module of `constant`.");
  module.def("seed_inside", &core::seed_inside, py::arg("seed"), py::arg("constant"),
             "The seed inside of the module of `constant`, which follows `seed`.");
  module.def("reseed", &runtime::reseed, py::arg("generators"), py::arg("seed"), "Gives every generator `seed`.");
  module.def("have_drawn", &runtime::have_drawn, py::arg("generators"),
             "Whether anything was drawn from a generator since it was seeded; False where that is not known.");
  module.def("draw_position", &runtime::draw_position, py::arg("generators"),
             "A number that changes with every draw from one of the generators.");
  module.def(
      "swap_warning_handler",
      [](std::uintptr_t handler) {
        const auto before = reinterpret_cast<std::uintptr_t>(c10::WarningUtils::get_warning_handler());
        c10::WarningUtils::set_warning_handler(reinterpret_cast<c10::WarningHandler*>(handler));
        return before;
      },
      py::arg("handler"),
      "Gives this thread a handler of torch's warnings, 0 for torch's first; returns the one that it had.");
}

}  // namespace fold3d::bindings
