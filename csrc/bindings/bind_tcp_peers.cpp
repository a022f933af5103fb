#include "bindings/bindings.h"

#include <ATen/core/Tensor.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "comm/base/clock.h"
#include "comm/socket/fork_guard.h"
#include "comm/tcp/tcp_peers.h"

namespace py = pybind11;

namespace fold3d::bindings {

namespace {

std::span<std::byte> bytes_of(const at::Tensor& message) {
  if (!message.is_contiguous() || !message.is_cpu()) {
    throw std::invalid_argument("a message must be contiguous and in host memory");
  }
  return {static_cast<std::byte*>(message.data_ptr()), message.nbytes()};
}

comm::Channel channel_of(bool forward) { return forward ? comm::Channel::kForward : comm::Channel::kBackward; }

}  // namespace

void bind_tcp_peers(py::module_& module) {
  module.def("keep_from_children", py::overload_cast<int, std::uint64_t>(&comm::keep_from_children),
             py::arg("descriptor"), py::arg("inode"),
             "Processes forked from now on do not keep this socket; nothing happens once the descriptor is another's.");
  py::class_<comm::TcpPeers, std::shared_ptr<comm::TcpPeers>>(
      module, "TcpPeers", "The point-to-point peers of one stage over TCP, for host memory.")
      .def(py::init<int, int, const std::string&, std::string, std::string>(), py::arg("stage"), py::arg("num_stages"),
           py::arg("host"), py::arg("secret"), py::arg("job") = "")
      .def_property_readonly("port", [](const comm::TcpPeers& peers) { return peers.endpoint().port; })
      .def(
          "connect",
          [](comm::TcpPeers& peers, const std::pair<std::string, int>& next,
             const std::pair<std::string, int>& previous, double timeout_seconds, bool both_ways) {
            const py::gil_scoped_release release;
            peers.connect({next.first, next.second}, {previous.first, previous.second},
                          comm::milliseconds(timeout_seconds), both_ways);
          },
          py::arg("next"), py::arg("previous"), py::arg("timeout_seconds"), py::arg("both_ways") = false,
          "Connects to where the next and the previous stage listen, `both_ways` for segments that run back; all "
          "stages call.")
      .def(
          "send",
          [](comm::TcpPeers& peers, const at::Tensor& message, bool forward) {
            const std::span<std::byte> bytes = bytes_of(message);
            const py::gil_scoped_release release;
            peers.send(channel_of(forward), forward ? peers.next() : peers.previous(), bytes);
          },
          py::arg("message"), py::arg("forward"), "Sends bytes to the next stage if `forward`, else to the previous.")
      .def(
          "recv",
          [](comm::TcpPeers& peers, const at::Tensor& message, bool forward) {
            const std::span<std::byte> bytes = bytes_of(message);
            const py::gil_scoped_release release;
            peers.recv(channel_of(forward), forward ? peers.previous() : peers.next(), bytes);
          },
          py::arg("message"), py::arg("forward"), "Fills `message` from the stage before if `forward`, else the next.")
      .def("abort", &comm::TcpPeers::abort, py::arg("reason"), py::call_guard<py::gil_scoped_release>(),
           "Ends every blocked and later call with an error; any thread.");
}

}  // namespace fold3d::bindings
