"""The ways of generating text in docs/processes.md, after training and in a callback in the middle of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import fold3d
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, collate, rows, stock_arguments

PAGE = Path(__file__).parents[2] / "docs" / "processes.md"
PROMPT = torch.tensor([[5, 9, 12]])


def recipe(name: str) -> Any:
    """Returns a function that the page shows."""
    block = next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if f"def {name}(" in code)
    space: dict[str, Any] = {}
    exec(block, space)
    return space[name]


class Samples(TrainerCallback):
    """Generates after every step."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(0)
        made = recipe("sample_now")(self.trainer, PROMPT)
        self.texts.append(None if made is None else made.tolist())


def generate(folder: str, layout: dict[str, Any]) -> tuple[list[Any], Any, Any]:
    """Returns what is generated in training, after it from what was saved, and after it by all processes."""
    Path(folder).mkdir(exist_ok=True)
    os.chdir(folder)
    arguments = stock_arguments(Job(folder, arguments={"max_steps": 2, "learning_rate": 0.05})) | layout
    callback = Samples()
    trainer = fold3d.Trainer(
        args=fold3d.TrainingArguments(**arguments),
        model=models.build(models.gpt2_config()),
        train_dataset=rows(16),
        data_collator=collate,
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train()
    after = recipe("sample")(trainer, PROMPT)
    torch.manual_seed(0)
    everywhere = recipe("sample_everywhere")(trainer, PROMPT)
    trainer.engine.close()
    return callback.texts, None if after is None else after.tolist(), everywhere.tolist()


@pytest.mark.parametrize("layout", [{"pp": 2, "segments": 1}, {"dp": 2, "segments": 2, "dp_sync": "zero1"}], ids=str)
def test_recipes(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    whole, last, sampled = generate(
        str(tmp_path / "whole"), {"segments": 1, "gradient_accumulation_steps": 4 if "dp" in layout else 2}
    )
    (texts, after, ours), (others, nothing, theirs) = ranks.run(generate, 2, str(tmp_path / "ours"), layout)
    assert texts == whole and after == last == whole[-1] and len(texts) == 2
    assert others == [None, None] and nothing is None
    assert ours == theirs == sampled
