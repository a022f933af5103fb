"""What leaves the device with fold3d, beside torch's `save_on_cpu` and transformers' activation checkpointing.

    python -m benchmarks.offload [--layers 8] [--width 256] [--micro-batches 8] [--steps 9] [--ratio 0.7] [--json FILE]

Trains a GPT-2 with all-in-all-out, 4 segments, each way in a process of its own, on a CPU that plays a device: copies
between it and the pool run at a rate at which what a micro-batch saves takes `--ratio` of its forward, both directions
together (0.70 is PCIe 4.0 beside an A100 at width 12288, benchmarks/cluster/scenarios.py; a run of fold3d without limit
says the rate). fold3d's copies are its own. torch's hooks, also those of transformers' `offload=True`, copy each saved
tensor on the computing stream, so here copies last as long on the computing thread; what they copy to is no memory of
torch's.

The processes take turns, a step of each, so that what else the machine does meets all of them alike. Seconds: the
median of the measured steps; slower: the median, over the turns, of a way's step by the step of the same turn where
nothing leaves. Device: the most bytes that tensors hold, weights, gradients and optimizer included; pool: the most on
the other side; copied: both directions, of one step. Ways whose losses differ are an error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import time
import weakref
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any
from unittest import mock

import numpy
import torch
import transformers
from torch import Tensor

import fold3d
from benchmarks.cluster.on_rank.copies import copies_at
from benchmarks.memory_model import LENGTH, model_of
from fold3d import _C

WARM_UP = 2
SEGMENTS = 4
TIMEOUT_S = 600
SHORTEST_S = 1e-3
"""Of a sleep: short ones last longer than they should, which small tensors would pay for."""
OURS: dict[str, dict[str, str]] = {
    "nothing leaves": {},
    "fold3d, offload=activations": {"offload": "activations"},
    "blocks run again": {"recompute": "blocks"},
    "fold3d, recompute=blocks, offload=boundaries": {"recompute": "blocks", "offload": "boundaries"},
}
"""What is compared -> settings of fold3d."""
TORCH = "torch, save_on_cpu around the step"
HF = "transformers, activation_checkpointing, offload=True"


class Link:
    """Of the hooks: copies on the thread that computes, at `rate` bytes per second; 0: as fast as they are."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.copied = self.held = self.peak = 0
        self.owed = 0.0  # seconds

    def out(self, tensor: Tensor) -> Tensor:
        """Returns a copy in memory of numpy's."""
        with self._lasting(tensor.nbytes):
            memory = numpy.empty(tensor.nbytes, numpy.uint8)
            packed = torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)
            packed.copy_(tensor)
        self._hold(tensor.nbytes)
        weakref.finalize(memory, self._hold, -tensor.nbytes)
        return packed

    def back(self, saved: Tensor) -> Tensor:
        """Returns a copy in torch's memory."""
        with self._lasting(saved.nbytes):
            return saved.clone()

    def _hold(self, more: int) -> None:
        self.held += more
        self.peak = max(self.peak, self.held)

    @contextlib.contextmanager
    def _lasting(self, size: int) -> Any:
        self.copied += size
        start = time.perf_counter()
        yield
        if not self.rate:
            return
        self.owed += max(0.0, size / self.rate - (time.perf_counter() - start))
        if self.owed >= SHORTEST_S:
            start = time.perf_counter()
            time.sleep(self.owed)
            self.owed -= time.perf_counter() - start

    def hooks(self, *_: Any, **__: Any) -> torch.autograd.graph.saved_tensors_hooks:
        """Takes the place of torch's save_on_cpu, and does to each tensor what it does."""
        return torch.autograd.graph.saved_tensors_hooks(self.out, self.back)


@dataclass(kw_only=True)
class Found:
    """Of one way. Bytes."""

    seconds: list[float]
    """Of each measured step."""
    device: int
    pool: int
    copied: int
    forward_s: float
    """Of a step: a third of its computing, where nothing runs again."""
    losses: list[float]


@dataclass(frozen=True)
class Setup:
    """What all ways train."""

    sizes: tuple[int, int]
    """Layers, width."""
    micro_batches: int
    steps: int


def work(way: str, setup: Setup, rate: float, turns: Connection) -> None:
    """One process: trains one way, a step for each message, and sends what it found."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    assert _C.count_cpu_bytes(True), "another allocator is in use"
    torch.manual_seed(0)
    model = model_of(*setup.sizes)
    link = Link(rate)
    with contextlib.ExitStack() as around:
        around.enter_context(copies_at(rate))
        if way == HF:
            around.enter_context(mock.patch("transformers.modeling_utils.save_on_cpu", link.hooks))
            model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
        turns.send(train(model, way, link, setup, turns))


def train(model: transformers.PreTrainedModel, way: str, link: Link, setup: Setup, turns: Connection) -> Found:
    """Returns what some steps cost; each waits for its turn and says when it is over."""
    ids = torch.randint(0, 2048, (2 * setup.micro_batches, LENGTH))
    settings: dict[str, Any] = {"recompute": "none", "offload": "none"} | OURS.get(way, {})
    config = fold3d.ParallelConfig(segments=SEGMENTS, schedule="aiao", micro_batches=setup.micro_batches, **settings)
    engine = fold3d.Engine(
        model,
        config,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        example={"input_ids": ids[:2], "labels": ids[:2]},
    )
    seconds, losses, computing = [], [], []
    for step in range(WARM_UP + setup.steps):
        turns.recv()
        if step == WARM_UP:
            _C.reset_peak_cpu_bytes()
            link.peak = link.held
        link.copied = 0
        start = time.perf_counter()
        with link.hooks() if way == TORCH else contextlib.nullcontext():
            losses.append(engine.step({"input_ids": ids, "labels": ids}).loss.item())
        seconds.append(time.perf_counter() - start)
        account = engine.breakdown()
        computing.append(account.compute_ms)
        turns.send(None)
    found = Found(
        seconds=seconds[WARM_UP:],
        device=_C.peak_cpu_bytes(),
        pool=max(link.peak, account.pool_peak_bytes),
        copied=max(link.copied, 2 * account.offload_bytes),
        forward_s=median(computing[WARM_UP:]) / 3e3,
        losses=losses,
    )
    engine.close()
    return found


def answer(way: str, turns: Connection) -> Any:
    """Returns the next message of a process. Raises RuntimeError where none comes."""
    try:
        if turns.poll(TIMEOUT_S):
            return turns.recv()
    except EOFError:
        pass
    raise RuntimeError(f"{way}: its process ended, or did not answer in {TIMEOUT_S} s")


def run(ways: list[str], setup: Setup, rate: float) -> dict[str, Found]:
    """Returns what the processes found, one for each way, which step in turns."""
    context = multiprocessing.get_context("spawn")
    turns: dict[str, Connection] = {}
    processes = []
    for way in ways:
        turns[way], theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(way, setup, rate, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
    for _ in range(WARM_UP + setup.steps):
        for way in ways:
            turns[way].send(None)
            answer(way, turns[way])
    found = {way: answer(way, turns[way]) for way in ways}
    for process in processes:
        process.join(TIMEOUT_S)
    return found


def slowdown(found: Found, kept: Found) -> float:
    """Returns by how much steps are slower than those of the same turns of `kept`: the median, a share."""
    return median(one / other for one, other in zip(found.seconds, kept.seconds, strict=True)) - 1


def check_losses(rows: dict[str, Found]) -> None:
    """Raises RuntimeError where a way computes something else."""
    first = next(iter(rows.values())).losses
    for way, found in rows.items():
        if found.losses != first:
            raise RuntimeError(f"{way}: losses {found.losses}, expected {first}")


def main() -> None:
    """Prints a line for every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9, help="measured, of each way")
    parser.add_argument("--ratio", type=float, default=0.7, help="copying what a micro-batch saves, over its forward")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.layers < SEGMENTS or options.steps < 1 or not options.ratio > 0:
        parser.error(f"--layers must be at least {SEGMENTS}, --steps at least 1, --ratio positive")
    setup = Setup((options.layers, options.width), options.micro_batches, options.steps)
    kept, free = run(list(OURS)[:2], setup, 0.0).values()
    rate = free.copied / 2 / (options.ratio * kept.forward_s)
    print(f"copies at {rate / 1e6:.0f} MB/s: {options.ratio:g} of a forward for what it saves")
    print("| way | s a step | slower | device MB | pool MB | copied MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = run([*list(OURS)[:2], TORCH, *list(OURS)[2:], HF], setup, rate)
    kept = next(iter(rows.values()))
    for way, found in rows.items():
        sizes = " | ".join(f"{size / 1e6:.1f}" for size in (found.device, found.pool, found.copied))
        print(f"| {way} | {median(found.seconds):.3f} | {100 * slowdown(found, kept):+.1f} % | {sizes} |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({way: {**asdict(found), "rate": rate} for way, found in rows.items()}, file, indent=1)
    check_losses(rows)


if __name__ == "__main__":
    main()
