"""What late gradients cost in loss, and what corrections give back, on the text of `make demo`.

    python benchmarks/late_gradients.py [--steps N] [--seeds N] [--png FILE] [--json FILE]

A small GPT-2 is trained by fold3d in one process: exactly, with gradient_delay=1, and with each delay_correction, with
several optimizers and rates; weights and data are the same in all runs of a seed. Printed: the loss on text that was
held back, less that of the exact run, and the largest stable rates of gradient descent on a parabola, from the roots of
a polynomial. `--png` draws the loss of the training batches over the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

Batch = dict[str, torch.Tensor]
WAYS = {
    "exact": {},
    "late": {"gradient_delay": 1},
    "error_feedback": {"gradient_delay": 1, "delay_correction": "error_feedback"},
    "predict": {"gradient_delay": 1, "delay_correction": "predict"},
}
OPTIMIZERS: dict[str, tuple[Callable[[list[Parameter]], Optimizer], tuple[float, ...]]] = {
    "SGD": (partial(SGD, lr=0.1), (0.1, 0.3, 1.0)),
    "SGD, momentum 0.9": (partial(SGD, lr=0.1, momentum=0.9), (0.03, 0.1, 0.3)),
    "AdamW": (partial(AdamW, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1), (0.002, 0.006, 0.02)),
}
"""Name -> what makes it, and its peak rates."""
VOCABULARY, LENGTH, ROWS, WARM_UP, HELD_BACK = 512, 48, 8, 20, 64


def sequences() -> list[torch.Tensor]:
    """Returns the demo's text as rows of LENGTH tokens."""
    from pretrain_gpt import documents, make_sequences, make_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        texts = documents(0.5)
        tokenizer = make_tokenizer(Path(folder), texts, VOCABULARY)
        return [row["input_ids"] for row in make_sequences(tokenizer, texts, LENGTH)]


def train(
    way: str,
    optimizer: Callable[[list[Parameter]], Optimizer],
    rate: float,
    rows: Sequence[torch.Tensor],
    *,
    steps: int,
    seed: int,
) -> tuple[list[float], float]:
    """Returns the loss of each step's batch before its update, and that of the text that was held back at the end."""
    from transformers import AutoModelForCausalLM, GPT2Config

    import fold3d

    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_embd=48, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"
    layout = fold3d.ParallelConfig(micro_batches=1, **WAYS[way])
    engine = fold3d.Engine(model, layout, optimizer=optimizer, max_grad_norm=1.0)
    order = torch.randperm(len(rows) - HELD_BACK, generator=torch.Generator().manual_seed(seed)) + HELD_BACK
    losses = []
    for step in range(steps):
        if engine.optimizer is not None:
            engine.optimizer.param_groups[0]["lr"] = rate * _share(step, steps)
        elif step == 0:
            engine.evaluate(_batch(rows[:ROWS]))  # builds it
            assert engine.optimizer is not None
            engine.optimizer.param_groups[0]["lr"] = rate * _share(step, steps)
        taken = order[[(step * ROWS + k) % len(order) for k in range(ROWS)]]
        losses.append(engine.step(_batch([rows[k] for k in taken.tolist()])).loss.item())
        if not math.isfinite(losses[-1]):
            break
    engine.finish_updates()
    held = engine.evaluate(_batch(rows[:HELD_BACK])).item()
    engine.close()
    return losses, held


def _batch(rows: Sequence[torch.Tensor]) -> Batch:
    whole = torch.stack(list(rows))
    return {"input_ids": whole, "labels": whole}


def _share(step: int, steps: int) -> float:
    """Returns what of the peak rate a step has: warm-up, then a cosine, as the demo's."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


# The parabola

# z -> w(t+1)/w(t); `rate` is that times the curvature.
POLYNOMIALS: dict[str, Callable[[float], list[float]]] = {
    "exact": lambda rate: [1, rate - 1],  # w(t+1) = w(t) - rate w(t)
    "late": lambda rate: [1, -1, rate],  # ... - rate w(t-1)
    # predict: ... - rate (2 w(t-1) - w(t-2)); error_feedback: ... - rate (2 w(t-1) - w(t-2)), too
    "corrected": lambda rate: [1, -1, 2 * rate, -rate],
}


def most_stable_rate(polynomial: Callable[[float], list[float]]) -> float:
    """Returns the largest rate times curvature up to which gradient descent on a parabola converges."""
    low, high = 1e-3, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        stable = max(abs(np.roots(polynomial(middle)))) <= 1
        low, high = (middle, high) if stable else (low, middle)
    return low


def parabola_table() -> Iterator[str]:
    """Yields the lines of the table of stable rates."""
    yield "| gradient descent on a parabola | largest stable rate x curvature |"
    yield "| --- | --- |"
    for name, polynomial in POLYNOMIALS.items():
        yield f"| {name} | {most_stable_rate(polynomial):.3f} |"


# The table and the picture


def table(results: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of the table of losses on text that was held back; over several seeds the mean."""
    yield "| optimizer | peak rate | exact | late | error_feedback | predict |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, (_, rates) in OPTIMIZERS.items():
        for rate in rates:
            held = {way: [run["held"] for run in results[f"{name}, {rate:g}, {way}"]] for way in WAYS}
            exact = held["exact"]
            cells = [f"{statistics.mean(exact):.4f}"]
            for way in list(WAYS)[1:]:
                more = [one - base for one, base in zip(held[way], exact, strict=True)]
                mean = statistics.mean(more)
                spread = f" ({min(more):+.4f} ... {max(more):+.4f})" if len(more) > 1 else ""
                cells.append(f"{mean:+.4f}{spread}" if math.isfinite(mean) else "diverged")
            yield f"| {name} | {rate:g} | {' | '.join(cells)} |"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws the losses of the first seed, smoothed: a row per optimizer, a column per rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(WAYS, ("black", "tab:red", "tab:green", "tab:blue"), strict=True))
    figure, grid = pyplot.subplots(len(OPTIMIZERS), 3, figsize=(11, 8), sharex=True)
    for row, (name, (_, rates)) in zip(grid, OPTIMIZERS.items(), strict=True):
        for axes, rate in zip(row, rates, strict=True):
            for way, colour in colours.items():
                losses = results[f"{name}, {rate:g}, {way}"][0]["losses"]
                width = 10
                means = [statistics.mean(losses[max(0, k - width) : k + 1]) for k in range(len(losses))]
                axes.plot(means, color=colour, linewidth=1, label=way)
            axes.set_title(f"{name}, rate {rate:g}", fontsize=9)
            low = min(min(results[f"{name}, {rate:g}, {way}"][0]["losses"]) for way in WAYS)
            axes.set_ylim(low - 0.1, math.log(VOCABULARY) + 0.6)
    grid[0][0].legend(fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("step", fontsize=9)
    for row in grid:
        row[0].set_ylabel("loss", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Runs the whole grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = sequences()
    results: dict[str, Any] = {}
    for name, (optimizer, rates) in OPTIMIZERS.items():
        for rate in rates:
            for way in WAYS:
                runs = results.setdefault(f"{name}, {rate:g}, {way}", [])
                for seed in range(options.seeds):
                    losses, held = train(way, optimizer, rate, rows, steps=options.steps, seed=seed)
                    runs.append({"losses": losses, "held": held})
                print(f"{name}, {rate:g}, {way}: {runs[-1]['held']:.4f}", file=sys.stderr, flush=True)
    print("\n".join([*table(results), "", *parabola_table()]))
    if options.json is not None:
        options.json.write_text(json.dumps(results))
    if options.png is not None:
        draw(results, options.png)


if __name__ == "__main__":
    main()
