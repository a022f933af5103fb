"""Kernels on the simulated device: what a process that has it runs."""

from __future__ import annotations

import torch

from fold3d import _C
from simdevice import sim

assert _C.has_kernels(torch.device("cpu"))  # the module brings the operators
OPS = torch.ops.fold3d


def ordered() -> None:
    """They run on the stream, asynchronously, with the CPU's numbers and without a race."""
    flat, count = torch.randn(100_000), sim.launches()
    wanted = torch.zeros(2, dtype=torch.float64)
    OPS.squares(flat, wanted)
    result = torch.zeros(2, dtype=torch.float64, device="sim")
    with sim.jitter(100):
        OPS.squares(flat.to("sim"), result)
        weight, master, mean, square = (torch.ones(64, device="sim") for _ in range(4))
        scale, step = torch.tensor(0.5, dtype=torch.float64), torch.tensor(1.0)
        OPS.adamw_([weight], [weight * 2], [mean], [square], [step], [master], scale, 1e-2, 0.9, 0.99, 1e-8, 0.1)
        parts = [torch.full((k,), k, dtype=torch.uint8, device="sim") for k in (3, 5)]
        buffer = torch.zeros(8, dtype=torch.uint8, device="sim")
        OPS.pack(parts, [0, 3], buffer)
        back = [torch.zeros_like(part) for part in parts]
        OPS.unpack(buffer, [0, 3], back)
    assert torch.equal(result.cpu(), wanted) and sim.launches() > count + 4
    assert buffer.tolist() == [3] * 3 + [5] * 5 and [one.tolist() for one in back] == [[3] * 3, [5] * 5]
    assert torch.equal(weight.cpu(), master.cpu()) and float(weight[0]) < 1
    assert not sim.take_reports()


def races() -> list[str]:
    """Returns what the detector says of each kernel that another stream's write is not ordered with."""
    found = []
    for call in (
        lambda x, buffer: OPS.squares(x, torch.zeros(2, dtype=torch.float64, device="sim")),
        lambda x, buffer: OPS.pack([x], [0], buffer),
        lambda x, buffer: OPS.unpack(buffer, [0], [x]),
        lambda x, buffer: OPS.adamw_(
            *([[x], [torch.ones_like(x)], [torch.ones_like(x)], [torch.ones_like(x)], [torch.tensor(1.0)], []]),
            *(torch.tensor(1.0, dtype=torch.float64), 1e-2, 0.9, 0.99, 1e-8, 0.1),
        ),
    ):
        x, buffer = torch.ones(1000, device="sim"), torch.zeros(4000, dtype=torch.uint8, device="sim")
        torch.accelerator.synchronize()
        with torch.Stream("sim"):
            x.add_(1)
        try:
            call(x, buffer)
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
        torch.accelerator.synchronize()
        sim.take_reports()
    return found
