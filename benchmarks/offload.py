"""What leaves the device with fold3d, beside torch's `save_on_cpu` and transformers' activation checkpointing.

    python -m benchmarks.offload [--layers 8] [--width 256] [--micro-batches 8] [--ratio 0.7] [--json FILE]

Trains a GPT-2 in one process with all-in-all-out, 4 segments, each way in a fresh process, on a CPU that plays a
device: copies between it and the pool run at a rate at which what a micro-batch saves takes `--ratio` of its forward,
both directions together (0.70 is PCIe 4.0 beside an A100 at width 12288, benchmarks/cluster/scenarios.py; a run of
fold3d without limit says the rate). fold3d's copies are its own. torch's hooks, also those of transformers'
`offload=True`, copy each saved tensor on the computing stream, so here each copy lasts as long on the computing
thread; what they copy to is no memory of torch's.

Seconds: the median of the measured steps. Device: the most bytes that tensors hold, weights, gradients and optimizer
included; pool: the most on the other side; copied: both directions, of one step.
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

WARM_UP, STEPS = 2, 5
SEGMENTS = 4
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
        end = time.perf_counter() + (size / self.rate if self.rate else 0.0)
        yield
        time.sleep(max(0.0, end - time.perf_counter()))

    def hooks(self, *_: Any, **__: Any) -> torch.autograd.graph.saved_tensors_hooks:
        """Takes the place of torch's save_on_cpu, and does to each tensor what it does."""
        return torch.autograd.graph.saved_tensors_hooks(self.out, self.back)


@dataclass(kw_only=True)
class Found:
    """Of one way. Bytes."""

    step_s: float
    device: int
    pool: int
    copied: int
    forward_s: float
    """Of a step: a third of its computing, where nothing runs again."""
    loss: float


def work(way: str, sizes: tuple[int, int], micro_batches: int, rate: float, out: Any) -> None:
    """One process: trains one way, and puts what it found."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    assert _C.count_cpu_bytes(True), "another allocator is in use"
    torch.manual_seed(0)
    model = model_of(*sizes)
    link = Link(rate)
    with contextlib.ExitStack() as around:
        around.enter_context(copies_at(rate))
        if way == HF:
            around.enter_context(mock.patch("transformers.modeling_utils.save_on_cpu", link.hooks))
            model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
        out.put(train(model, way, link, micro_batches))


def train(model: transformers.PreTrainedModel, way: str, link: Link, micro_batches: int) -> Found:
    """Returns what some steps cost."""
    ids = torch.randint(0, 2048, (2 * micro_batches, LENGTH))
    settings: dict[str, Any] = {"recompute": "none", "offload": "none"} | OURS.get(way, {})
    config = fold3d.ParallelConfig(segments=SEGMENTS, schedule="aiao", micro_batches=micro_batches, **settings)
    engine = fold3d.Engine(
        model,
        config,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        example={"input_ids": ids[:2], "labels": ids[:2]},
    )
    seconds, loss = [], 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            _C.reset_peak_cpu_bytes()
            link.peak = link.held
        link.copied = 0
        start = time.perf_counter()
        with link.hooks() if way == TORCH else contextlib.nullcontext():
            loss = engine.step({"input_ids": ids, "labels": ids}).loss.item()
        seconds.append(time.perf_counter() - start)
    account = engine.breakdown()
    found = Found(
        step_s=median(seconds[WARM_UP:]),
        device=_C.peak_cpu_bytes(),
        pool=max(link.peak, account.pool_peak_bytes),
        copied=max(link.copied, 2 * account.offload_bytes),
        forward_s=account.compute_ms / 3e3,
        loss=loss,
    )
    engine.close()
    return found


def run(way: str, sizes: tuple[int, int], micro_batches: int, rate: float) -> Found:
    """Returns what a fresh process found."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    process = context.Process(target=work, args=(way, sizes, micro_batches, rate, out))
    process.start()
    found: Found = out.get(timeout=600)
    process.join()
    return found


def main() -> None:
    """Prints a line for every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--ratio", type=float, default=0.7, help="copying what a micro-batch saves, over its forward")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.layers < SEGMENTS or not options.ratio > 0:
        parser.error(f"--layers must be at least {SEGMENTS}, --ratio positive")
    sizes = options.layers, options.width
    kept, free = (run(way, sizes, options.micro_batches, 0.0) for way in list(OURS)[:2])
    rate = free.copied / 2 / (options.ratio * kept.forward_s)
    print(f"copies at {rate / 1e6:.0f} MB/s: {options.ratio:g} of a forward for what it saves")
    print("| way | s a step | slower | device MB | pool MB | copied MB |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = {}
    for way in [*list(OURS)[:2], TORCH, *list(OURS)[2:], HF]:
        found = run(way, sizes, options.micro_batches, rate)
        kept = found if way == "nothing leaves" else kept
        rows[way] = {**asdict(found), "rate": rate}
        slower = 100 * (found.step_s / kept.step_s - 1)
        sizes_text = " | ".join(f"{size / 1e6:.1f}" for size in (found.device, found.pool, found.copied))
        print(f"| {way} | {found.step_s:.3f} | {slower:+.1f} % | {sizes_text} |", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
