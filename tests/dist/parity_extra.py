"""Jobs of the parity tests beside the grid: evaluation, dropout masks, parameters without gradient."""

from __future__ import annotations

import functools
import io
import logging
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn

import fold3d
from tests.dist import parity_jobs as jobs
from tests.dist.parity_cases import LENGTH, Case
from tests.helpers import data, models

EVALUATION_ROWS = 3
"""Rows per replica in an evaluation: not the micro-batch size of training, nor a multiple of it."""


# Evaluation


def evaluation_rows(case: Case) -> jobs.Batch:
    """Returns one evaluation batch over all replicas, of another length than the training rows (images have one)."""
    if case.family in jobs.IMAGES:
        return jobs.images(case, case.dp * EVALUATION_ROWS, 77)
    return data.batch(case.dp * EVALUATION_ROWS, LENGTH + 4, start=77, padded=True)


def evaluate(case: Case) -> list[float]:
    """Returns the evaluation loss before, between and after two steps of fold3d; called on every rank."""
    with jobs.precision(case):
        engine = jobs.engine_of(case)
        replica = engine.topology.dp_rank
        rows = {name: tensor.split(EVALUATION_ROWS)[replica] for name, tensor in evaluation_rows(case).items()}
        batch = jobs.on(engine.device, rows)
        found = [engine.evaluate(batch).item()]
        for step in range(2):
            engine.step(jobs.batch_of(engine, case, step))
            found.append(engine.evaluate(batch).item())
        assert engine.model.training, "evaluate puts the mode back"
        engine.close()
    return found


class _Evaluating(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **others: Any) -> None:
        self.losses.append(metrics["eval_loss"])


def evaluate_alone(case: Case) -> list[float]:
    """Returns the same three losses of the stock Trainer in this process."""
    whole = evaluation_rows(case)
    rows = [{name: tensor[row] for name, tensor in whole.items()} for row in range(len(whole["labels"]))]
    seen = _Evaluating()
    with jobs.precision(case), tempfile.TemporaryDirectory() as folder:
        named = jobs.trainer_arguments(case, folder)
        named |= {"gradient_accumulation_steps": case.total, "max_steps": 2, "per_device_eval_batch_size": len(rows)}
        named |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "prediction_loss_only": True}
        transformers.Trainer(
            model=jobs.build(case),
            args=transformers.TrainingArguments(**named),
            train_dataset=jobs.dataset(case),
            eval_dataset=rows,
            data_collator=jobs.collate,
            callbacks=[seen],
        ).train()
    return seen.losses


# Dropout


def shares_of_equal_rows(case: Case) -> list[float]:
    """Returns the last chunk's loss per micro-batch when all of a replica's micro-batches are the same rows."""
    with jobs.precision(case):
        engine = jobs.engine_of(case)
        shares = []

        def loss_of(model: nn.Module, batch: jobs.Batch) -> Tensor:
            loss: Tensor = model(**batch).loss
            shares.append(loss.item())
            return loss / case.m

        same = jobs.micro_batches_of(case.alone(), jobs.global_batch(case, 0), 0)[0]
        torch.manual_seed(123)
        before = torch.get_rng_state()
        engine.run([same] * case.m, loss_of)
        assert engine.optimizer is not None
        engine.optimizer.zero_grad()
        engine.run([same] * case.m, loss_of)
        assert torch.equal(torch.get_rng_state(), before), "the user's random numbers are not touched"
        engine.close()
    return shares


def forwards_in_training_mode(case: Case) -> list[float]:
    """Returns the losses of two forwards of the same rows before the first step, and of one behind it."""
    with jobs.precision(case):
        engine = jobs.engine_of(case)
        rows = jobs.on(engine.device, jobs.micro_batches_of(case.alone(), jobs.global_batch(case, 0), 0)[0])
        before = torch.get_rng_state()
        found = [engine.forward(rows, lambda model, batch: model(**batch).loss).item() for _ in range(2)]
        engine.step(jobs.batch_of(engine, case, 0))
        engine.flush()
        found.append(engine.forward(rows, lambda model, batch: model(**batch).loss).item())
        assert torch.equal(torch.get_rng_state(), before), "the user's random numbers are not touched"
        engine.close()
    return found


def changing_chances(case: Case, name: str) -> list[float]:
    """Returns the losses of steps in which the dropouts named so have their chances, 0, and others."""
    with jobs.precision(case):
        model = jobs.build(case)
        dropouts = [one for path, one in model.named_modules() if path.endswith(name) and isinstance(one, nn.Dropout)]
        assert dropouts
        engine, losses = jobs.engine_of(case, model), []
        for step, chance in enumerate((None, 0.0, 0.2)):
            for dropout in dropouts if chance is not None else ():
                dropout.p = chance
            losses.append(engine.step(jobs.batch_of(engine, case, step)).loss.item())
        engine.close()
    return losses


class Noisy(models.PlainModel):
    """Draws noise in front of its blocks and reads it behind them, in evaluations, too."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Returns how far from the noise it ends."""
        x = self.embedding(input_ids)
        noise = torch.randn_like(x)
        x = x + noise
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.norm(x), noise)


def noisy_evaluations(case: Case) -> list[float]:
    """Returns the losses of an evaluation in front of a step, and of two behind it."""
    with jobs.precision(case):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Noisy(layers=case.layers).double()
            model.layers = nn.ModuleList(AnnealedBlock(16, 0.0) for _ in range(case.layers)).double()
        engine = jobs.engine_of(case, model)
        torch.manual_seed(engine.topology.rank)  # generators of processes need not be alike
        rows = jobs.on(engine.device, jobs.micro_batches_of(case.alone(), jobs.global_batch(case, 0), 0)[0])
        losses = [engine.evaluate(rows).item()]
        engine.step(jobs.batch_of(engine, case, 0))
        losses += [engine.evaluate(rows).item() for _ in range(2)]
        engine.close()
    return losses


def training_parts(case: Case) -> float:
    """Returns a loss of a model in evaluation mode but for its dropouts."""
    with jobs.precision(case):
        model = jobs.build(case).eval()
        for module in model.modules():
            module.train(isinstance(module, nn.Dropout) and not list(module.children()))
        engine = jobs.engine_of(case, model)
        rows = jobs.on(engine.device, jobs.micro_batches_of(case.alone(), jobs.global_batch(case, 0), 0)[0])
        loss: float = engine.forward(rows, lambda model, batch: model(**batch).loss).item()
        engine.close()
    return loss


class DrawingBlock(models.PlainBlock):
    """One that mixes no positions and draws in the way `kind`."""

    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, hidden]."""
        out = self.down(torch.tanh(self.up(self.norm(x))))
        if not self.training:
            return x + out
        if self.kind == "alpha":
            return x + nn.functional.alpha_dropout(out, 0.1, training=True)
        if self.kind == "method":
            return x + out * torch.full_like(out, 0.5).bernoulli()
        return x + out * x.new_empty([1, 1, 1]).bernoulli_(0.5)  # for all samples the same


def drawing(case: Case, kind: str) -> list[float] | str:
    """Returns the losses of three steps, or why there are none."""
    with jobs.precision(case):
        model = jobs.build(case)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [DrawingBlock(16, 0.0) for _ in range(case.layers)]
        for layer in layers:
            layer.kind = kind
        model.layers = nn.ModuleList(layers).double()
        engine = jobs.engine_of(case, model)
        try:
            return [engine.step(jobs.batch_of(engine, case, step)).loss.item() for step in range(3)]
        except fold3d.RankError as error:
            return str(error)
        finally:
            engine.close()


class AnnealedBlock(models.PlainBlock):
    """One that mixes no positions and drops out by itself: by an attribute, or by what nobody sees."""

    unseen: ClassVar[list[float]] = []

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__(hidden, dropout)
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, hidden]."""
        out, rate = self.down(torch.tanh(self.up(self.norm(x)))), max([self.rate, *self.unseen])
        return x + nn.functional.dropout(out, rate, self.training) if rate else x + out


def annealed(case: Case, *, unseen: bool) -> tuple[list[float], str]:
    """Returns the losses of four steps, the last two with dropout, and what was said."""
    said = io.StringIO()
    handler, log = logging.StreamHandler(said), logging.getLogger("fold3d")
    with jobs.precision(case):
        model = jobs.build(case)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [AnnealedBlock(16, 0.0) for _ in range(case.layers)]
        model.layers = nn.ModuleList(layers).double()
        engine, losses = jobs.engine_of(case, model), []
        log.addHandler(handler)
        for step in range(4):
            rate = 0.3 if step > 1 else 0.0
            AnnealedBlock.unseen[:] = [rate] if unseen else []
            for layer in layers:
                layer.rate = 0.0 if unseen else rate
            losses.append(engine.step(jobs.batch_of(engine, case, step)).loss.item())
        engine.close()
        log.removeHandler(handler)
        AnnealedBlock.unseen.clear()
    return losses, said.getvalue()


# Parameters without gradient


class Fussy(models.PlainModel):
    """Some parameters are not used by every micro-batch: one never, `shift` and gains only when the rows are long."""

    def __init__(self) -> None:
        super().__init__(layers=4, tied=True)
        self.unused = nn.Parameter(torch.ones(5))
        self.shift = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(FussyBlock(16, 0.0) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Returns the mean loss."""
        x = self.embedding(input_ids)
        if x.shape[1] > LENGTH:
            x = x + self.shift
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class FussyBlock(models.PlainBlock):
    """A PlainBlock with a gain for long rows."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__(hidden, dropout)
        self.gain = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, hidden]."""
        out = super().forward(x)
        return out * self.gain if x.shape[1] > LENGTH else out


def fussy_model() -> Fussy:
    """Returns the model in float64, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Fussy().double().train()


LONG = {1: (1,), 3: (0, 2)}
"""Step -> global micro-batches with long rows; in the other steps there is none."""
FUSSY_STEPS = 5


def fussy_batches(total: int, step: int) -> list[jobs.Batch]:
    """Returns the micro-batches of one step over all replicas."""
    lengths = [LENGTH + 3 if number in LONG.get(step, ()) else LENGTH - 2 for number in range(total)]
    return [data.batch(2, length, start=step * 101 + 7 * k) for k, length in enumerate(lengths)]


def _every_decays(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=jobs.LEARNING_RATE, weight_decay=jobs.WEIGHT_DECAY, eps=jobs.EPSILON)


def fussy_alone(total: int) -> tuple[jobs.Result, list[set[str]]]:
    """Returns the result of a torch loop, and per step the names that had no gradient."""
    model, result, without = fussy_model(), jobs.Result(), []
    optimizer = _every_decays(list(model.parameters()))
    for step in range(FUSSY_STEPS):
        loss = sum(model(**batch) / total for batch in fussy_batches(total, step))
        loss.backward()
        without.append({name for name, p in model.named_parameters() if p.grad is None})
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), jobs.MAX_NORM).item())
        result.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    result.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return result, without


def fussy(case: Case, example_step: int, attached: bool) -> tuple[jobs.Result, list[set[str]], set[str]]:
    """Returns what `fussy_alone` does and the names this rank holds, through Engine.run and a loop of one's own.

    Args:
        example_step: the model is recorded with micro-batch 0 of this step, which is long or short.
        attached: the engine steps the optimizer; else it leaves gradients in `.grad`.
    """
    model, result, without = fussy_model(), jobs.Result(), []
    torch.set_default_dtype(torch.float64)  # of the losses; set after the weights are drawn
    example = fussy_batches(case.total, example_step)[0]
    make = _every_decays if attached else None
    engine = fold3d.Engine(model, jobs.config_of(case), optimizer=make, example=example)
    optimizer = engine.optimizer or _every_decays(list(engine.owned.values()))
    for step in range(FUSSY_STEPS):
        mine = fussy_batches(case.total, step)[engine.topology.dp_rank :: case.dp]
        loss = engine.run(mine, lambda model, batch: model(**batch) / case.m)
        without.append({name for name, p in engine.owned.items() if p.grad is None})
        result.norms.append(engine.clip_grad_norm(jobs.MAX_NORM).item())
        if case.dp > 1:  # run returns the replica's loss
            engine.groups.data.all_reduce(loss)
        result.losses.append(loss.item() / case.dp)
        optimizer.step()
        if attached:
            result.digests.append(jobs.digests(engine))
    result.weights = engine.state_dict()["model"]
    held = set(engine.owned)
    engine.close()
    return result, without, held


def frozen_stage(case: Case) -> list[float]:
    """Trains with the plain `functools.partial(AdamW)` of the README where a stage has no trainable parameter."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = jobs.build(case)
    make = functools.partial(torch.optim.AdamW, lr=jobs.LEARNING_RATE)
    engine = fold3d.Engine(model, jobs.config_of(case), optimizer=make)
    losses = [engine.step(jobs.batch_of(engine, case, step)).loss.item() for step in range(2)]
    engine.close()
    return losses
