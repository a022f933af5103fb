"""What the memory model predicts against what torch's allocator counts, over a grid of layouts.

    python -m benchmarks.memory_model [--layers 8] [--width 256] [--json FILE]

Every layout trains a GPT-2 of that size for three steps in fresh processes on CPUs. Each process counts the bytes that
its tensors hold (csrc/runtime/memory), from the second step on; the prediction is made of nothing but shapes, before
training. Each line is the process of the layout whose prediction is worst.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers

import fold3d
from benchmarks.local.ranks import run_ranks
from fold3d import _C
from fold3d.plan.costs import NetworkCosts
from fold3d.plan.job import TrainingJob
from fold3d.plan.memory import peaks_of
from fold3d.plan.memory_options import predicted_curves
from fold3d.profile.layers import assumed_profile
from fold3d.recompute import Recompute
from fold3d.trace import trace

STEPS, LENGTH, VOCABULARY = 3, 128, 2048
GRID: list[dict[str, Any]] = [
    {"pp": 1, "dp": 1, "segments": 1, "schedule": "1f1b", "micro_batches": 4},
    {"pp": 2, "dp": 1, "segments": 1, "schedule": "1f1b", "micro_batches": 8},
    {"pp": 2, "dp": 1, "segments": 1, "schedule": "gpipe", "micro_batches": 8},
    {"pp": 2, "dp": 1, "segments": 2, "schedule": "interleaved", "micro_batches": 8},
    {"pp": 2, "dp": 1, "segments": 2, "schedule": "aiao", "micro_batches": 4},
    {"pp": 2, "dp": 1, "segments": 4, "schedule": "aiao", "micro_batches": 8},
    {"pp": 4, "dp": 1, "segments": 2, "schedule": "aiao", "micro_batches": 8},
    {"pp": 1, "dp": 2, "segments": 1, "schedule": "1f1b", "micro_batches": 4, "dp_sync": "early"},
    {"pp": 2, "dp": 2, "segments": 2, "schedule": "aiao", "micro_batches": 4, "dp_sync": "early"},
    {"pp": 2, "dp": 2, "segments": 2, "schedule": "aiao", "micro_batches": 4, "dp_sync": "zero1"},
    {"pp": 2, "dp": 2, "segments": 1, "schedule": "1f1b", "micro_batches": 4, "dp_sync": "zero1"},
    {"pp": 1, "dp": 1, "segments": 4, "schedule": "aiao", "micro_batches": 4},
    {"pp": 2, "dp": 1, "segments": 2, "schedule": "aiao", "micro_batches": 8, "recompute": "full"},
    {"pp": 2, "dp": 1, "segments": 1, "schedule": "1f1b", "micro_batches": 8, "recompute": "blocks/blocks:2"},
    {"pp": 2, "dp": 1, "segments": 2, "schedule": "aiao", "micro_batches": 8, "offload": "activations"},
    {
        "pp": 2,
        "dp": 1,
        "segments": 2,
        "schedule": "aiao",
        "micro_batches": 8,
        "recompute": "blocks",
        "offload": "boundaries",
    },
    {"pp": 1, "dp": 1, "tp": 2, "segments": 1, "schedule": "1f1b", "micro_batches": 4, "sequence_parallel": False},
    {"pp": 2, "dp": 1, "tp": 2, "segments": 2, "schedule": "aiao", "micro_batches": 4, "sequence_parallel": False},
    {"pp": 2, "dp": 1, "tp": 2, "segments": 2, "schedule": "aiao", "micro_batches": 4, "sequence_parallel": True},
]


def model_of(layers: int, width: int) -> transformers.PreTrainedModel:
    """Returns a GPT-2."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, attn_pdrop=0.0
    )
    config.use_cache = False
    made: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return made


def work(world: int, case: dict[str, Any], sizes: tuple[int, int], batch: int) -> tuple[int, int, int, str]:
    """One process: trains; returns stage, predicted and counted bytes, and what they are for."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if world > 1:
        dist.init_process_group("gloo")
    assert _C.count_cpu_bytes(True), "another allocator is in use"
    before = _C.live_cpu_bytes()
    # How weights are shared out is part of the engine's own plan.
    config = fold3d.ParallelConfig(**case, memory_limit="1TB" if case.get("tp", 1) > 1 else None)
    ids = torch.zeros(batch * config.micro_batches, LENGTH, dtype=torch.long)
    micro_batch = {"input_ids": ids[:batch], "labels": ids[:batch]}
    model = model_of(*sizes)
    recorded = trace(model, example=micro_batch)
    again = Recompute.parse(case.get("recompute", "none"))
    profile = assumed_profile(model, recorded, micro_batch, flops_per_second=1e10, recompute=again)
    engine = fold3d.Engine(model, config, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3), example=micro_batch)
    for step in range(STEPS):
        if step == 1:
            _C.reset_peak_cpu_bytes()
        engine.step({"input_ids": ids, "labels": ids})
    engine.flush()
    counted = _C.peak_cpu_bytes() - before
    network = NetworkCosts(pp_latency=1e-4, pp_bandwidth=1e9, dp_bandwidth=1e9, hop_latency=1e-4)
    topology = engine.topology
    job = TrainingJob(
        trace=recorded,
        profile=profile,
        network=network,
        dp=topology.dp,
        pp=topology.pp,
        micro_batches=config.micro_batches,
    )
    strategy = engine.strategy
    if strategy.ranges == ((0, 0),):  # in one piece: it was not looked into
        strategy = dataclasses.replace(strategy, ranges=((0, len(recorded.blocks)),))
    curves = engine.memory.curves() if topology.tp > 1 else predicted_curves(job, strategy)
    peak = peaks_of(curves)[topology.pp_rank]
    engine.close()
    if world > 1:
        dist.destroy_process_group()
    return topology.pp_rank, peak.bytes, counted, peak.text()


def run(case: dict[str, Any], sizes: tuple[int, int], batch: int) -> list[tuple[int, int, int, str]]:
    """Returns stage, predicted and counted bytes and their uses of every process."""
    world = case["dp"] * case["pp"] * case.get("tp", 1)
    return sorted(run_ranks(work, world, world, case, sizes, batch))


def main() -> None:
    """Prints a line for every layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="samples of a micro-batch, default 2")
    parser.add_argument("--only", type=int, help="number of one layout")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows, errors = [], []
    cases = GRID if options.only is None else [GRID[options.only]]
    print("| layout | process of stage | predicted MB | counted MB | error |")
    print("| --- | --- | --- | --- | --- |")
    for case in cases:
        found = run(case, (options.layers, options.width), options.batch)
        stage, predicted, counted, uses = max(found, key=lambda one: abs(one[1] / one[2] - 1))
        error = predicted / counted - 1
        errors.append(abs(error))
        text = " ".join(f"{name}={value}" for name, value in case.items())
        print(f"| {text} | {stage} | {predicted / 1e6:.1f} | {counted / 1e6:.1f} | {100 * error:+.1f} % |", flush=True)
        rows.append({**case, "stage": stage, "predicted": predicted, "counted": counted, "uses": uses})
    print(f"median error {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
