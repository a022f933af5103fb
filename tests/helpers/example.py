"""The example script, and arguments that make it small."""

from __future__ import annotations

from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
TINY = [
    *("--layers", "4", "--hidden", "16", "--heads", "2", "--vocabulary", "300", "--length", "32"),
    *("--megabytes", "0.01", "--eval_sequences", "8", "--max_steps", "3", "--logging_steps", "1"),
    *("--gradient_accumulation_steps", "2", "--warmup_steps", "1"),
]
