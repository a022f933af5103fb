"""What fold3d costs where it cannot help: one process, and pipeline stages without work.

    python benchmarks/overhead.py [--json FILE]

(a) One process: fold3d.Trainer against transformers.Trainer on the same GPT-2, same data; tokens/s, taken in turns.
(b) Two processes, empty stages: microseconds per compute action of fold3d's Executor (and of the whole Engine) against
    torch.distributed.pipelining's runtime with the same schedule; taken in turns in the same processes.
Ratios of medians; absolute times mean little on a shared machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

STAGES, MICRO_BATCHES, WIDTH = 2, 16, 64
SCHEDULES = {
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "aiao": ("ScheduleLoopedBFS", 2),
}


# (a) one process


def trainer_speed(trainer_class: type, arguments_class: type, steps: int) -> float:
    """Returns the tokens per second of `steps` optimizer steps, the first quarter left out."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

    rows, length, micro_batches = 4, 128, 4
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=192, n_head=4, vocab_size=2048, n_positions=length, use_cache=False)
    )
    ids = torch.randint(0, 2048, (rows * micro_batches * steps, length), generator=torch.Generator().manual_seed(1))
    dataset = [{"input_ids": row, "labels": row} for row in ids]
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_class(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=micro_batches,
            max_steps=steps,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer_class(model=model, args=arguments, train_dataset=dataset, callbacks=[Clock()]).train()
    first = steps // 4
    return rows * length * micro_batches * (steps - 1 - first) / (stamps[-1] - stamps[first])


def one_process(rounds: int, steps: int) -> dict[str, float]:
    """Returns the median tokens/s of both trainers and their ratio."""
    import transformers

    import fold3d

    transformers.logging.set_verbosity_error()
    speeds: dict[str, list[float]] = {"transformers": [], "fold3d": []}
    for turn in range(rounds):
        order = list(speeds) if turn % 2 == 0 else list(speeds)[::-1]
        for name in order:
            module: Any = transformers if name == "transformers" else fold3d
            speeds[name].append(trainer_speed(module.Trainer, module.TrainingArguments, steps))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    pairs = [ours / theirs for ours, theirs in zip(speeds["fold3d"], speeds["transformers"], strict=True)]
    return {
        **medians,
        "ratio": medians["fold3d"] / medians["transformers"],
        "lowest pair": min(pairs),
        "highest pair": max(pairs),
    }


# (b) empty stages


class Scale(nn.Module):
    """A stage without work: one multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Stack(nn.Module):
    """The same as a plain model for the Engine."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class EmptyChunk:
    """A chunk for the bare Executor."""

    def __init__(self, module: nn.Module, source: torch.Tensor | None, is_last: bool) -> None:
        self.module, self.source, self.is_last = module, source, is_last

    def forward(self, micro_batch: int, received: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        x = self.module(received[0] if self.source is None else self.source)
        return ([x.sum()], x.detach().sum()) if self.is_last else ([x], None)

    def reduce(self) -> None:
        raise RuntimeError("one replica reduces nothing")


def torch_runtime(class_name: str, segments: int) -> Callable[[], None]:
    """Returns one step of torch.distributed.pipelining."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    rank, device = dist.get_rank(), torch.device("cpu")
    stages = [PipelineStage(Scale(), s * STAGES + rank, STAGES * segments, device) for s in range(segments)]
    schedule_class = getattr(pipelining.schedules, class_name)
    single = class_name == "Schedule1F1B"
    schedule = schedule_class(stages[0] if single else stages, MICRO_BATCHES, loss_fn=lambda y, t: (y * t).sum())
    x, target = torch.ones(MICRO_BATCHES, WIDTH), torch.ones(MICRO_BATCHES, WIDTH)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])

    return step


def fold3d_executor(name: str, segments: int, transport: str) -> Callable[[], None]:
    """Returns one step of the bare Executor with the same schedule, over "tcp" (the CPU's default) or "c10d"."""
    from fold3d import _C
    from fold3d import schedule as schedules
    from fold3d.comms.connections import connect_stages
    from fold3d.comms.groups import Groups
    from fold3d.topology import Topology

    topology, device = Topology(dp=1, pp=STAGES, rank=dist.get_rank()), torch.device("cpu")
    groups = Groups(topology, device, 60.0, [], with_p2p=transport == "c10d")
    peers = connect_stages(topology, groups.world, 60.0) if transport == "tcp" else None
    source = torch.ones(1, WIDTH)
    last = STAGES * segments - 1
    chunks = [EmptyChunk(Scale(), source if v == 0 else None, v == last) for v in topology.chunks(segments)]
    executor = _C.Executor(
        chunks, topology.pp_rank, STAGES, groups.p2p_names(), device, 60.0, f"rank {topology.rank}", peers
    )
    compute = schedules.generate(name, pp=STAGES, segments=segments, micro_batches=MICRO_BATCHES)
    lowered = schedules.lower(compute, reduce=False)

    def step() -> None:
        executor.run(lowered, topology.pp_rank, True, range(MICRO_BATCHES))
        executor.take_spans(), executor.take_records()

    return step


def fold3d_engine(name: str, segments: int) -> Callable[[], None]:
    """Returns the forwards and backwards of one Engine step with the same schedule."""
    from fold3d import Engine, ParallelConfig

    config = ParallelConfig(pp=STAGES, segments=segments, micro_batches=MICRO_BATCHES, schedule=name, blocks="layers")
    batch = [{"x": torch.ones(1, WIDTH)} for _ in range(MICRO_BATCHES)]
    engine = Engine(Stack(STAGES * segments), config, example=batch[0])
    return lambda: engine.run(batch, lambda model, one: model(**one)) and None


def measure(rank: int, folder: str, repetitions: int) -> None:
    """One rank of (b): all systems in turn, `repetitions` times each; rank 0 writes the medians."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", STAGES), rank=rank, world_size=STAGES)
    table: dict[str, dict[str, float]] = {}
    for name, (class_name, segments) in SCHEDULES.items():
        systems = {
            "torch": torch_runtime(class_name, segments),
            "executor": fold3d_executor(name, segments, "tcp"),
            "executor over gloo": fold3d_executor(name, segments, "c10d"),
            "engine": fold3d_engine(name, segments),
        }
        times: dict[str, list[float]] = {system: [] for system in systems}
        for repetition in range(repetitions + 3):
            for system, step in systems.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                if repetition >= 3:  # the first steps connect and infer shapes
                    times[system].append((time.perf_counter() - start) / (2 * segments * MICRO_BATCHES) * 1e6)
        table[name] = {system: statistics.median(values) for system, values in times.items()}
    if rank == 0:
        Path(f"{folder}/result.json").write_text(json.dumps(table))
    dist.barrier()
    os._exit(0)  # torch's runtime leaves groups behind that take long to end


def empty_stages(repetitions: int) -> dict[str, dict[str, float]]:
    """Returns microseconds per compute action of each schedule and system."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(folder, repetitions), nprocs=STAGES)
        table: dict[str, dict[str, float]] = json.loads(Path(f"{folder}/result.json").read_text())
    return table


def main() -> None:
    """Runs both parts and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="(a): runs of each trainer")
    parser.add_argument("--steps", type=int, default=16, help="(a): optimizer steps of a run")
    parser.add_argument("--repetitions", type=int, default=60, help="(b): steps of each system")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    stages = empty_stages(options.repetitions)
    print(f"(b) empty stages, {STAGES} processes, {MICRO_BATCHES} micro-batches: microseconds per compute action")
    ours = ["executor", "executor over gloo", "engine"]
    print(f"{'schedule':14}{'torch':>8}" + "".join(f"{name:>20}{'/ torch':>9}" for name in ours))
    for name, row in stages.items():
        print(
            f"{name:14}{row['torch']:8.0f}"
            + "".join(f"{row[system]:20.0f}{row[system] / row['torch']:9.2f}" for system in ours)
        )
    trainers = one_process(options.rounds, options.steps)
    print("(a) one process, tokens/s: " + ", ".join(f"{name} {value:.3f}" for name, value in trainers.items()))
    if options.json:
        options.json.write_text(json.dumps({"empty_stages": stages, "one_process": trainers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
