"""What GPUs make of fold3d, beside what else there is; needs GPUs, and two of them for most.

    make gpu                            # tests with GPUs, then this
    python -m benchmarks.gpu [--processes N] [--out FILE]

(a) One process: fold3d.Trainer against transformers.Trainer on the same GPT-2: tokens/s; MFU where the GPU is known.
(b) N replicas: fold3d, in every way of DP.sync, against plain DistributedDataParallel.
(c) N stages: fold3d against torch.distributed.pipelining.
(d) fold3d's kernels against torch's: norm, AdamW, putting small tensors together.
(e) Sums of a bucket over N replicas: in one, in slices, and in slices that are copied first.

Everything that is compared runs in turns in the same processes; ratios of medians count. The result is text to paste.
`--device cpu` runs the same in tiny sizes, to try the script: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.gpu.processes import run_rank
from benchmarks.gpu.ranks import Sizes, race

TINY = Sizes(layers=4, width=32, heads=2, vocabulary=64, length=16, rows=2, micro_batches=4, steps=2, rounds=1)
FULL = Sizes(
    layers=24, width=1024, heads=16, vocabulary=32_000, length=1024, rows=4, micro_batches=8, steps=6, rounds=3
)
NO_GPU = 2
"""Exit status where there is none."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure beside the one that it is compared with."""

    part: str
    system: str
    value: float
    unit: str
    ratio: float
    """To the part's first row."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 0, or NO_GPU at once where there is nothing to measure on."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--processes", type=int, help="replicas, and stages; default: the GPUs that there are")
    options.add_argument("--look", action="store_true", help="only say whether there is a GPU")
    options.add_argument("--out", type=Path, metavar="FILE", help="the same as JSON")
    given = options.parse_args(arguments)
    count = torch.cuda.device_count() if given.device == "cuda" and torch.cuda.is_available() else 0
    if given.device == "cuda" and count == 0:
        print(
            f"no GPU: torch {torch.__version__} sees none here, so there is nothing to measure. Run this on a machine "
            "that has one, better two, with a torch that has CUDA.",
            file=sys.stderr,
        )
        return NO_GPU
    if given.look:
        print(f"{count} GPU(s)")
        return 0
    processes = given.processes or (count if given.device == "cuda" else 2)
    if processes < 1 or (given.device == "cuda" and processes > count):
        print(f"--processes {processes}: there are {count} GPUs, and each process needs one", file=sys.stderr)
        return 1
    sizes = FULL if given.device == "cuda" else TINY
    rows = [*_one_process(given.device, sizes), *_kernels(given.device, sizes)]
    if processes > 1:
        rows += _several(given.device, sizes, processes)
    text = report(rows, given.device, processes)
    print(text)
    if processes == 1:
        print("One GPU: replicas and stages, (b), (c) and (e), need two.")
    if given.out:
        given.out.write_text(json.dumps([dict(zip(Row.__slots__, _values(row), strict=True)) for row in rows]))
    return 0


def report(rows: Sequence[Row], device: str, processes: int) -> str:
    """Returns the rows as a table of Markdown, under what they were measured on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU: figures mean nothing"
    cuda = torch.version.cuda or "none"
    lines = [
        f"{processes} x {name}; torch {torch.__version__}, CUDA {cuda}; `make gpu`, commit {commit or 'unknown'}",
        "",
        "| part | system | figure | ratio |",
        "| --- | --- | ---: | ---: |",
    ]
    lines += [f"| {row.part} | {row.system} | {row.value:,.4g} {row.unit} | {row.ratio:.3f} |" for row in rows]
    return "\n".join(lines)


def _values(row: Row) -> list[Any]:
    return [getattr(row, name) for name in Row.__slots__]


def _rows(part: str, unit: str, found: dict[str, float]) -> list[Row]:
    first = next(iter(found.values()))
    return [Row(part, system, value, unit, value / first) for system, value in found.items()]


# (a)


def _one_process(device: str, sizes: Sizes) -> list[Row]:
    import transformers

    import fold3d
    from fold3d.trainer.measuring import flops_of

    transformers.logging.set_verbosity_error()
    runs = {
        "transformers.Trainer": lambda: _trainer_speed(
            transformers.Trainer, transformers.TrainingArguments, device, sizes
        ),
        "fold3d.Trainer": lambda: _trainer_speed(fold3d.Trainer, fold3d.TrainingArguments, device, sizes),
    }
    found = {name: [] for name in runs}
    for _ in range(sizes.rounds):
        for name, run in runs.items():
            found[name].append(run())
    speeds = {name: statistics.median(values) for name, values in found.items()}
    rows = _rows("one process", "tokens/s", speeds)
    peak = flops_of(torch.cuda.get_device_name()) if device == "cuda" else None
    if peak:
        shares = {name: 100 * speed * sizes.flops_of_token / peak for name, speed in speeds.items()}
        rows += _rows("one process, MFU", "%", shares)
    return rows


def _trainer_speed(trainer: Any, arguments: Any, device: str, sizes: Sizes) -> float:
    """Returns the tokens per second of some optimizer steps, the first left out."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.heads,
        vocab_size=sizes.vocabulary,
        n_positions=sizes.length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    count = sizes.rows * sizes.micro_batches * (sizes.steps + 1)
    ids = torch.randint(0, sizes.vocabulary, (count, sizes.length), generator=torch.Generator().manual_seed(1))
    stamps: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        chosen = arguments(
            output_dir=folder,
            per_device_train_batch_size=sizes.rows,
            gradient_accumulation_steps=sizes.micro_batches,
            max_steps=sizes.steps + 1,
            use_cpu=device == "cpu",
            bf16=device == "cuda",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        dataset = [{"input_ids": row, "labels": row} for row in ids]
        made = trainer(model=GPT2LMHeadModel(config), args=chosen, train_dataset=dataset, callbacks=[Clock()])
        made.train()
    return sizes.tokens * (len(stamps) - 1) / (stamps[-1] - stamps[0])


# (b) and (c)


def _several(device: str, sizes: Sizes, processes: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        mp.spawn(run_rank, (processes, device, sizes, folder, str(out)), nprocs=processes)
        found = json.loads(out.read_text())
    rows = _rows(f"{processes} replicas", "tokens/s", found["replicas"])
    rows += _rows(f"{processes} stages", "tokens/s", found["stages"])
    return rows + _rows(f"sums of {processes} replicas", "bytes/s", found["sums"])


# (d)


def _kernels(device: str, sizes: Sizes) -> list[Row]:
    from fold3d import _C

    if not _C.has_kernels(torch.device(device)):
        print(f"fold3d was built without kernels for {device}: part (d) is left out", file=sys.stderr)
        return []
    rows = []
    for part, systems in kernel_systems(device, sizes).items():
        seconds = race(systems, device, rounds=3 * sizes.rounds)
        rows += _rows(f"kernel: {part}", "us", {name: 1e6 * value for name, value in seconds.items()})
    return rows


def kernel_systems(device: str, sizes: Sizes) -> dict[str, dict[str, Callable[[], Any]]]:
    """Returns, per kernel, what torch does and what fold3d does, on the same memory."""
    from fold3d.data_parallel.optimizer.bucket_optimizer import step_by_kernel

    count = sizes.width * sizes.width
    flat = torch.randn(12 * count, device=device)
    pieces = list(flat.split(count))
    result = torch.zeros(2, dtype=torch.float64, device=device)
    weights = [torch.nn.Parameter(torch.randn(count, device=device)) for _ in pieces]
    fused = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    ours = torch.optim.AdamW([torch.nn.Parameter(one.detach().clone()) for one in weights], lr=1e-3, fused=True)
    mine = dict(zip(ours.param_groups[0]["params"], pieces, strict=True))

    def torch_step() -> None:
        torch._foreach_mul_(pieces, 0.999)
        for weight, piece in zip(weights, pieces, strict=True):
            weight.grad = piece
        fused.step()

    small = [torch.randint(0, 255, (1000 + 64 * k,), dtype=torch.uint8, device=device) for k in range(100)]
    offsets = [sum(one.numel() for one in small[:k]) for k in range(len(small))]
    buffer = torch.empty(sum(one.numel() for one in small), dtype=torch.uint8, device=device)
    return {
        "norm": {
            "torch": lambda: torch.stack([n.double() for n in torch._foreach_norm(pieces)]).square().sum(),
            "fold3d": lambda: torch.ops.fold3d.squares(flat, result),
        },
        "clip and AdamW": {"torch": torch_step, "fold3d": lambda: step_by_kernel(ours, mine, 0.999)},
        "100 small tensors": {
            "torch": lambda: torch.cat(small),
            "fold3d": lambda: torch.ops.fold3d.pack(small, offsets, buffer),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
