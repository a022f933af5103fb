"""Replicas whose backwards take longer than comm_timeout, or never end; where they compute, others say (`Pause`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fold3d.errors import RankError
from tests.dist.dp_sync_waits import LAYERS, alone, batch_of, engine_of

LIMIT = 2.0
"""comm_timeout, in seconds."""
COMPUTE = 2 * LIMIT
"""What a replica's backward takes."""
SKEW = 0.3 * LIMIT
"""By how much another one's takes longer."""
HANG = 5 * LIMIT
"""What never comes takes so long: a test has to end."""
SLOW_STEP = 1
RUN = 150.0
"""Seconds for two engines and a few steps, on a machine whose cores are busy."""

Pause = Callable[[float], None]
"""Takes so many seconds of the computation under way."""


def train(seconds: list[float], pause: Pause = time.sleep, **settings: Any) -> dict[str, Any]:
    """Trains three steps; in the second one the backward of one layer, in the middle of the model, takes long.

    Args:
        seconds: by replica.
        pause: called in that backward.
        settings: of the layout.
    Returns: the error that ended it, "" for none; the seconds of the second step; how far the weights are from those
        of one process, infinitely where there was an error.
    """
    engine = engine_of(comm_timeout=60.0, **settings)  # what is imported when something runs first is no wait
    _step(engine, 0)
    engine.close()
    engine = engine_of(comm_timeout=LIMIT, **settings)
    topology = engine.topology
    now, done = 0, False

    def takes_long(gradient: Tensor) -> None:
        nonlocal done
        if now == SLOW_STEP and not done:
            done = True
            pause(seconds[topology.dp_rank])

    for name, parameter in engine.owned.items():
        if name == f"layers.{LAYERS // 2 - 1}.linear.weight":
            parameter.register_hook(takes_long)
    text, begin, length = "", 0.0, 0.0
    try:
        for now in range(3):
            dist.barrier()
            begin = time.monotonic()
            _step(engine, now)
            engine.flush()
            if now == SLOW_STEP:
                length = time.monotonic() - begin
    except RankError as error:
        text, length = str(error), time.monotonic() - begin
    distance = float("inf")
    if not text:
        want = alone(3)
        distance = max(float((p.detach().cpu() - want[name]).abs().max()) for name, p in engine.owned.items())
    engine.close()
    return {"error": text, "seconds": length, "distance": distance}


def _step(engine: Any, number: int) -> None:
    batch = batch_of(number, engine.topology.dp_rank)
    engine.step({name: tensor.to(engine.device) for name, tensor in batch.items()})
