"""What benchmarks of checkpoints, restarts and long trainings train: a GPT-2 on made-up tokens, on the CPU.

Torch is imported by those functions that need it: how long that takes is measured, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

LENGTH, VOCABULARY = 16, 8192


def add_options(parser: argparse.ArgumentParser, *, hidden: int, layers: int, steps: int) -> None:
    """Adds the mesh, the model's sizes, the number of steps and where the results go."""
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--json", type=Path)


def model(options: argparse.Namespace) -> Any:
    """Returns a GPT-2 without values: each process draws those of its own layers."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=options.layers,
        n_embd=options.hidden,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        use_cache=False,
    )
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def samples(count: int) -> list[dict[str, Any]]:
    """Returns as many, of `LENGTH` tokens each."""
    import torch

    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(options: argparse.Namespace, folder: str, *, save_every: int, **more: Any) -> Any:
    """Returns fold3d's of a training that saves into `folder`; `more` are others, or another value of these."""
    import fold3d

    named: dict[str, Any] = {
        "output_dir": folder,
        "dp": options.dp,
        "pp": options.pp,
        "weights": "random",
        "segments": 1,
        "dp_sync": "zero1",
        "use_cpu": True,
        "max_steps": options.steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": options.pp,
        "save_strategy": "steps",
        "save_steps": save_every,
        "async_save": options.async_save,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return fold3d.TrainingArguments(**named | more)
