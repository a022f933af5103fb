"""Running out of the simulated device's memory."""

from __future__ import annotations

import functools

import torch

import fold3d
from simdevice import sim
from tests.helpers.models import Squares, returned_loss


def out_of_memory() -> tuple[str, str, int]:
    """Returns what a step raises whose micro-batches are larger than planned: text and kind of its cause; and the bytes
    that were planned.
    """
    device = torch.device("sim", 0)
    config = fold3d.ParallelConfig(
        micro_batches=4, segments=2, schedule="aiao", blocks="layers", memory_limit=1_000_000
    )
    made = functools.partial(torch.randn, 64, 16, device=device)
    engine = fold3d.Engine(Squares(8), config, example={"x": made()}, device=device)
    planned = engine.planned_memory
    assert planned is not None and planned < 1_000_000
    sim.set_device_bytes(torch.accelerator.memory_allocated() + 900_000)
    try:
        engine.run([{"x": made()} for _ in range(4)], returned_loss)
        engine.run([{"x": torch.randn(2048, 16, device=device)} for _ in range(4)], returned_loss)
    except fold3d.RankError as error:
        return str(error), type(error.__cause__).__name__, planned
    finally:
        engine.close()
        sim.set_device_bytes(16 << 30)
    return "nothing", "", planned


def planned_for_the_device() -> list[tuple[str, int]]:
    """Returns what is recomputed and offloaded, and the bytes that are planned, where nobody has set a `memory_limit`:
    on a device that has room for everything, and on one that has not."""
    device = torch.device("sim", 0)
    config = fold3d.ParallelConfig(micro_batches=8, segments=1, schedule="gpipe", blocks="layers")
    example = {"x": torch.randn(32768, 16, device=device)}
    found = []
    for size in (16 << 30, 110_000_000):
        sim.set_device_bytes(size)
        engine = fold3d.Engine(Squares(8), config, example=example, device=device)
        sim.set_device_bytes(16 << 30)
        settings = dict(engine.strategy.settings)
        assert engine.planned_memory is not None
        found.append((f"{settings['recompute']}, {settings['offload']}", engine.planned_memory))
        engine.close()
    return found
