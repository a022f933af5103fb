"""Buffers that training changes, such as BatchNorm's statistics, are those of the stock Trainer under DDP."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import fold3d
from tests.helpers.ranks import RankPool

SIZE, CHANNELS, CLASSES = 6, 4, 3
TOLERANCE = 1e-12


class Block(nn.Module):
    """Convolution and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1, bias=False)  # BatchNorm has one
        self.norm = nn.BatchNorm1d(CHANNELS)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.norm(self.conv(hidden)))


class Codebook(Block):
    """Convolution and a moving average: its values are written, or it is replaced, always or sometimes."""

    spread: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        del self.norm
        self.register_buffer("spread", torch.ones(CHANNELS, 1))

    def forward(self, hidden: Tensor) -> Tensor:
        found = self.conv(hidden)
        if self.training:
            moved = 0.8 * self.spread + 0.2 * found.detach().abs().mean((0, 2))[:, None]
            if self.way == "data":
                self.spread.data.copy_(moved)
            elif self.way == "replaced" or float(hidden.detach().abs().sum()) % 1.0 > 0.6:
                self.spread = moved
        return hidden + torch.tanh(found / self.spread)


class ConvNet(nn.Module):
    """A classifier of sequences: [batch, CHANNELS, SIZE]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        made = [Block() if kind == "batchnorm" else Codebook(kind) for _ in range(4)]
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(CHANNELS, CLASSES)
        self.double()

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = values
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden.mean(-1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Reads(transformers.TrainerCallback):  # type: ignore[misc]
    """Sees gradients before the optimizer's step, so that they are gathered as a whole."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        assert all(parameter.grad is not None for parameter in named["model"].parameters())


@dataclass
class Job:
    """What to train; both Trainers understand it."""

    folder: str
    kind: str = "batchnorm"
    accumulation: int = 1
    reads_gradients: bool = False


@dataclass
class Outcome:
    """What one rank has at the end."""

    buffers: dict[str, Tensor]  # in the memory of this rank
    saved: dict[str, Tensor]
    losses: list[float]  # of evaluations
    state: dict[str, Tensor]  # of Engine.state_dict


def samples(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Returns samples whose mean and spread differ much, so that each rank's statistics do."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "values": torch.randn(CHANNELS, SIZE, generator=generator, dtype=torch.float64) * (1 + n % 5) + n % 3,
            "labels": torch.tensor(n % CLASSES),
        }
        for n in range(count)
    ]


def train(job: Job, layout: dict[str, Any] | None) -> Outcome:
    """Trains and evaluates on every rank: with the stock Trainer under DDP where there is no layout."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    named: dict[str, Any] = {
        "output_dir": job.folder,
        "use_cpu": True,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": job.accumulation,
        "max_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 11,
        "ddp_broadcast_buffers": job.reads_gradients or None,  # None stands for True
    }
    args: Any = (
        transformers.TrainingArguments(**named) if layout is None else fold3d.TrainingArguments(**named, **layout)
    )
    base: type[Any] = transformers.Trainer if layout is None else fold3d.Trainer
    callbacks = [Reads()] if job.reads_gradients else []
    model, train_set, eval_set = ConvNet(job.kind), samples(40, 3), samples(8, 4)
    trainer = base(model=model, args=args, train_dataset=train_set, eval_dataset=eval_set, callbacks=callbacks)
    trainer.train()
    trainer.save_model(job.folder)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    buffers = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    state = {}
    if layout is not None:
        buffers = {name: buffer.clone() for name, buffer in trainer.engine.buffers.items()}
        state = trainer.engine.state_dict()["model"]
        trainer.engine.close()
    return Outcome(buffers, load_file(Path(job.folder) / "model.safetensors"), losses, state)


def against_stock(ranks: RankPool, tmp_path: Path, job: Job, layout: dict[str, Any], pp: int = 1) -> None:
    """Compares each rank's buffers and evaluations, and what is saved."""

    def compare(mine: Tensor, theirs: Tensor, what: str) -> None:
        difference = float((mine.double() - theirs.double()).abs().max())
        assert difference <= TOLERANCE, (what, difference)

    job.folder = str(tmp_path / "stock")
    stock: list[Outcome] = ranks.run(train, 2, job, None)
    names = list(stock[0].buffers)
    assert any(not torch.equal(stock[0].buffers[name], stock[1].buffers[name]) for name in names)
    job.folder = str(tmp_path / "ours")
    ours: list[Outcome] = ranks.run(train, 2 * pp, job, layout)
    for replica, theirs in enumerate(stock):
        stages = ours[replica * pp : (replica + 1) * pp]
        found = {name: buffer for stage in stages for name, buffer in stage.buffers.items()}
        assert found.keys() == theirs.buffers.keys()
        for name in names:
            compare(found[name], theirs.buffers[name], f"replica {replica}: {name}")
    for rank in ours:
        assert rank.saved.keys() == rank.state.keys() == stock[0].saved.keys()
        for name, tensor in stock[0].saved.items():
            compare(rank.saved[name], tensor, f"saved {name}")
            compare(rank.state[name], tensor, f"state_dict {name}")
        compare(
            torch.tensor(rank.losses, dtype=torch.float64),
            torch.tensor(stock[0].losses, dtype=torch.float64),
            "evaluations",
        )


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(("accumulation", "reads_gradients"), [(1, False), (2, False), (1, True)])
def test_batchnorm(ranks: RankPool, tmp_path: Path, accumulation: int, reads_gradients: bool) -> None:
    job = Job("", accumulation=accumulation, reads_gradients=reads_gradients)
    against_stock(ranks, tmp_path, job, {"dp": 2, "segments": 1})


def test_batchnorm_in_stages(ranks: RankPool, tmp_path: Path) -> None:
    against_stock(ranks, tmp_path, Job("", accumulation=2), {"dp": 2, "pp": 2, "segments": 2}, pp=2)


@pytest.mark.parametrize("kind", ["data", "replaced", "sometimes"])
def test_buffers_of_ones_own(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    against_stock(ranks, tmp_path, Job("", kind), {"dp": 2, "segments": 1})
