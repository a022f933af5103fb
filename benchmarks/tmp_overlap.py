"""Sub-pipelined tensor parallelism against plain, on a network whose speed makes TP.sync as long as computing.

    python -m benchmarks.tmp_overlap [--ratio 1.0] [--layers 4] [--steps 8] [--batch 8] [--json FILE]

Two ranks on two hosts (network namespaces with limited links; needs root), one thread each, train the layers of a
Llama with tp=2 in turns in the same processes:

- plain: each sum is waited for where it is asked for (tp_overlap="none", sequence_parallel=False);
- fused: products next to a sum send one piece while they compute the next (tp_overlap="fused");
- sub: two halves of a micro-batch take turns (tp_overlap="sub"), which one sample has not;
- plain+sp, fused+sp, sub+sp: they share the sequence outside of regions, too (sequence_parallel=True);
- auto, auto+sp: as the planner chooses, or real steps where it cannot tell (tp_overlap="auto"); the steps before that
  are not counted, and what was predicted and chosen is printed;
- torch: the same layers by torch.distributed.tensor.parallel, colwise and rowwise, over gloo.

First a rank's share of the layers is timed without any network, all ranks at the same time; the links then get the
speed at which the bytes of a step's sums take `ratio` times as long, and let nothing through faster after a pause.
Beside the measured ratios: Merak's formula (section 5.3) and what fold3d's planner predicts from what it has measured.
All systems' losses are compared. Asynchronous tensor parallelism of torch (symmetric memory) needs GPUs and is not
here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.testbed.hosts import Link, NamespaceHosts
from benchmarks.cluster.testbed.ranks import Ranks

RANKS, TOKENS, WIDTH, HEADS, VOCABULARY = 2, 1024, 512, 8, 64
SUMS_PER_LAYER = 4  # attention and MLP, forward and backward
WARM_UP = 2
SETTLING = 15  # steps after which "auto" has tried everything
BURST_BYTES = 128 << 10  # that an idle link sends at once: two of the packets that TCP hands over
SYSTEMS = ("plain", "plain+sp", "fused", "fused+sp", "sub", "sub+sp", "auto", "auto+sp", "torch")


def make(layers: int, heads: int = HEADS, intermediate: int = 3 * WIDTH) -> torch.nn.Module:
    """Returns layers of a Llama, with weights by seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=WIDTH // HEADS, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(samples: int) -> dict[str, torch.Tensor]:
    """Returns samples of TOKENS in all."""
    shape = (samples, TOKENS // samples)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def loss_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs).loss
    return loss


def step_of(system: str, layers: int, samples: int) -> Callable[[], float]:
    """Returns what trains one micro-batch, forward and backward, and returns its loss."""
    model = make(layers)
    if system == "torch":
        return _torch_step(model, samples)
    from fold3d import Engine, ParallelConfig

    way, _, shared = system.partition("+")
    config = ParallelConfig(
        tp=RANKS, segments=1, tp_overlap="none" if way == "plain" else way, sequence_parallel=bool(shared)
    )
    engine = Engine(model, config, example=batch(samples))
    return lambda: float(engine.run([batch(samples)], loss_of))


def _torch_step(model: Any, samples: int) -> Callable[[], float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (RANKS,))
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    ways: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    for layer in model.model.layers:
        parallelize_module(
            layer, mesh, {name: ways[name.rpartition(".")[2]] for name, _ in layer.named_modules() if _is(name, ways)}
        )

    def step() -> float:
        model.zero_grad()
        loss = loss_of(model, batch(samples))
        loss.backward()
        return float(loss.detach())

    return step


def _is(name: str, ways: dict[str, Any]) -> bool:
    return name.rpartition(".")[2] in ways


def computing_seconds(layers: int, steps: int, samples: int) -> float:
    """Returns the median time of a step of a rank's share of the layers, with nothing to wait for."""
    model = make(layers, HEADS // RANKS, 3 * WIDTH // RANKS)
    times = []
    for _ in range(steps + WARM_UP):
        dist.barrier()
        start = time.perf_counter()
        model.zero_grad()
        loss_of(model, batch(samples)).backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def work(rank: int) -> None:
    """A rank: answers requests, a line of JSON each, from its standard input."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        if request["what"] == "compute":
            answer = {"seconds": computing_seconds(request["layers"], request["steps"], request["samples"])}
        else:
            answer = _compare(request["layers"], request["steps"], request["samples"])
        print(json.dumps(answer), file=answers, flush=True)


def _compare(layers: int, steps: int, samples: int) -> dict[str, Any]:
    systems = [system for system in SYSTEMS if not system.startswith("sub") or samples > 1]
    remarks = _Remarks()
    steps_of: dict[str, Callable[[], float]] = {}
    for system in systems:
        remarks.about = system
        steps_of[system] = step_of(system, layers, samples)
        for _ in range(SETTLING if system.startswith("auto") else 0):
            steps_of[system]()
    times: dict[str, list[float]] = {system: [] for system in systems}
    losses: dict[str, float] = {}
    for number in range(steps + WARM_UP):
        for system in systems if number % 2 == 0 else systems[::-1]:
            dist.barrier()
            start = time.perf_counter()
            losses[system] = steps_of[system]()
            if number >= WARM_UP:
                times[system].append(time.perf_counter() - start)
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise RuntimeError(f"the systems' losses differ: {losses}")
    return {"times": times, "losses": losses, "remarks": remarks.found}


class _Remarks(logging.Handler):
    """What fold3d logs about how TP.sync is hidden."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.about = ""
        self.found: list[str] = []
        logging.getLogger("fold3d").setLevel(logging.INFO)
        logging.getLogger("fold3d").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.about.startswith("auto") and text.startswith("tp_overlap: "):
            self.found.append(f"{self.about}: {text}")


def ask(hosts: NamespaceHosts, requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns the answers of all ranks, started anew on `hosts`, to each request."""
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, **hosts.environment(), "PYTHONPATH": root}
    commands = [hosts.command(rank, [sys.executable, __file__, "--rank", str(rank)]) for rank in range(RANKS)]
    with tempfile.TemporaryDirectory() as folder, Ranks(commands, environment, Path(folder)) as ranks:
        return [ranks.ask(request, 1800.0) for request in requests]


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=1.0, help="TP.sync over computing")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="of each system")
    parser.add_argument("--batch", type=int, default=8, help=f"samples, of {TOKENS} tokens in all")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank)
        return
    from fold3d.plan.costs import TpExchange
    from fold3d.plan.space.tp_overlap import traffic

    request = {"layers": options.layers, "steps": options.steps, "samples": options.batch}
    with NamespaceHosts(RANKS, Link(rate_mbit=10_000)) as hosts:
        compute = max(answer["seconds"] for answer in ask(hosts, [{"what": "compute"} | request])[0])
    size = 4 * TOKENS * WIDTH
    sums = SUMS_PER_LAYER * options.layers
    sent = sums * traffic(TpExchange(size), RANKS)[0]
    bandwidth = sent / (options.ratio * compute)
    with NamespaceHosts(RANKS, Link(rate_mbit=8e-6 * bandwidth, burst_s=BURST_BYTES / bandwidth)) as hosts:
        (answers,) = ask(hosts, [{"what": "compare"} | request])
        description = hosts.description
    sync = sent / bandwidth
    systems = answers[0]["times"]
    medians = {s: statistics.median(map(max, zip(*(a["times"][s] for a in answers), strict=True))) for s in systems}
    # A forward is a third of the computing and half of the sums.
    forward, exchange = compute / 3 / options.layers, sync / 2 / options.layers
    merak = (
        0.75 * forward
        + 0.5 * exchange
        + (options.layers - 0.25) * max(3 * forward, 2 * forward + exchange, 2 * exchange)
    )
    print(f"{description}; computing {1e3 * compute:.0f} ms, TP.sync {1e3 * sync:.0f} ms a step")
    for system in systems:
        print(f"{system:10}{1e3 * medians[system]:10.1f} ms   {medians['plain'] / medians[system]:.3f}")
    for remark in answers[0]["remarks"]:
        print(remark)
    if "sub" in systems:
        formula = (3 * forward + 2 * exchange) * options.layers / merak
        print(f"plain / sub-pipelined: measured {medians['plain'] / medians['sub']:.3f}, with shared sequences "
              f"{medians['plain+sp'] / medians['sub+sp']:.3f}, Merak's formula {formula:.3f}")  # fmt: skip
    if options.json:
        options.json.write_text(
            json.dumps(
                {"compute": compute, "sync": sync, "medians": medians, "remarks": answers[0]["remarks"]}, indent=2
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
