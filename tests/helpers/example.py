"""The example scripts, arguments that make them small, and ways to run them."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "pretrain_gpt.py"
TINY = [
    *("--layers", "4", "--hidden", "16", "--heads", "2", "--vocabulary", "300", "--length", "32"),
    *("--megabytes", "0.01", "--eval_sequences", "8", "--max_steps", "3", "--logging_steps", "1"),
    *("--gradient_accumulation_steps", "2", "--warmup_steps", "1"),
]
DRAWN = ["--weights", "random"]
"""For pretrain_gpt.py with fold3d, whose model has no values; not for the stock Trainer."""
FEW = ["--max_steps", "3", "--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "3"]
MELODIES = (
    *("--layers", "2", "--hidden", "32", "--seconds", "1", "--samples", "32", "--eval_samples", "12"),
    *("--letters", "4", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "6"),
)
SENTENCES = (
    *("--layers", "2", "--hidden", "32", "--samples", "40", "--eval_samples", "12", "--lora_r", "2"),
    *("--max_length", "24", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "6"),
)
SMALL = {
    "finetune_bert_classification.py": (
        *("--layers", "2", "--hidden", "32", "--samples", "20", "--eval_samples", "12", "--length", "24"),
        *("--lines", "3", "--dropout", "0", "--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"),
    ),
    "t5_summarization.py": (
        *("--layers", "2", "--hidden", "32", "--samples", "60", "--eval_samples", "12", "--dropout", "0"),
        *("--source_length", "24", "--target_length", "8", "--per_device_eval_batch_size", "6"),
    ),
    "vit_digits.py": (
        *("--layers", "2", "--hidden", "32", "--size", "16", "--patch", "4", "--samples", "64", "--eval_samples", "12"),
        *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "6"),
    ),
    "whisper_ctc_or_seq2seq.py": MELODIES,
    "whisper_ctc_or_seq2seq.py --ctc": ("--ctc", *MELODIES),
    "sft_lora.py": SENTENCES,
    "sft_lora.py --packing": ("--packing", *SENTENCES),
    "sft_lora.py --load_in_4bit": ("--load_in_4bit", *SENTENCES, "--hidden", "64"),  # the block that bitsandbytes packs
}
IN_SINGLE = ("whisper_ctc_or_seq2seq.py", "--load_in_4bit")
"""Examples, and options, that cannot run in double precision: feature extractors and 4-bit kernels do not."""
STOCK = re.compile(r"^( *)(.*\S) +# stock: (.*)$", re.MULTILINE)
"""A line of an example that differs from the stock script, and what stands there; "..." are the same names."""


def as_stock(script: Path) -> str:
    """Returns the text of an example with its marked lines as they are without fold3d.

    Raises: AssertionError when it has none, or needs fold3d elsewhere.
    """

    def line(found: re.Match[str]) -> str:
        indent, ours, stock = found.groups()
        return indent + stock.replace("...", ours.partition(" import ")[2])

    text, count = STOCK.subn(line, script.read_text().replace("\nimport fold3d\n", "\n"))
    assert 1 <= count <= 2, f"{count} lines of {script.name} are marked"
    code = [line for line in text.split('"""', 2)[2].splitlines() if not line.strip().startswith("#")]
    assert not any("fold3d" in line for line in code)
    return text


def run(script: str, folder: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Runs a script whose Trainer calls `save_state()`, in double precision if it can; returns what rank 0 logged.

    Args:
        folder: its output_dir.
        arguments: the rest of its command line.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    before, default = sys.argv, torch.get_default_dtype()
    sys.argv = [script, "--output_dir", folder, "--disable_tqdm", "True", *arguments]
    single = not {Path(script).name, *arguments}.isdisjoint(IN_SINGLE)
    torch.set_default_dtype(torch.float32 if single else torch.float64)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = before
        torch.set_default_dtype(default)
    if int(os.environ.get("RANK", "0")) > 0:
        return []  # rank 0 may be writing it still
    found: list[dict[str, Any]] = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return found
