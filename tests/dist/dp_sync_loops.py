"""Training loops of one's own around Engine.run with an attached optimizer, and what goes wrong in them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import fold3d
from fold3d.data_parallel.bucket import PendingGradient
from fold3d.data_parallel.bucket_schedule import BucketSchedule
from fold3d.data_parallel.dp_sync import DpSync
from fold3d.errors import Fold3dError
from fold3d.placement.bucket_layout import BucketSpec

WORDS, WIDTH, MICRO_BATCHES = 11, 6, 2
Batch = dict[str, Tensor]


class Chain(nn.Module):
    """Embedding, four layers, head; `norm`: the forward reads the head's weight before the head runs."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.norm:
            x = x / self.head.weight.norm()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(norm: bool = False, dtype: torch.dtype = torch.float64) -> Chain:
    """Returns the model, the same everywhere."""
    return Chain(norm).to(dtype)


def batches(step: int, replica: int) -> list[Batch]:
    """Returns the micro-batches of one replica."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    draws = [torch.randint(0, WORDS, (2, 5), generator=generator) for _ in range(2 * MICRO_BATCHES)]
    return [{"ids": draws[2 * i], "labels": draws[2 * i + 1]} for i in range(MICRO_BATCHES)]


def sgd(parameters: Any) -> Optimizer:
    """Returns SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def share(model: nn.Module, batch: Batch) -> Tensor:
    """Returns a micro-batch's share of the loss."""
    loss: Tensor = model(**batch) / MICRO_BATCHES
    return loss


def scaled_share(model: nn.Module, batch: Batch) -> Tensor:
    """The same, times a number made of weights that the model's forward reads later."""
    factor = 1.0 + model.head.weight.detach().square().sum()  # type: ignore[union-attr,operator]
    return share(model, batch) * factor


def alone(steps: int, loss_fn: Callable[[nn.Module, Batch], Tensor] = share, norm: bool = False) -> dict[str, Tensor]:
    """Returns the weights after so many steps of two replicas in one process."""
    model = build(norm)
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(2):
            for batch in batches(step, replica):
                (loss_fn(model, batch) / 2).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def engine_of(model: nn.Module, dp_sync: str, **others: Any) -> fold3d.Engine:
    """Returns an engine over two replicas; `dp_sync` as in `make_engine`."""
    settings = {"segments": 1, "micro_batches": MICRO_BATCHES, "blocks": "layers", "bucket_bytes": 0}
    engine = make_engine(model, dp_sync, settings, example=batches(0, 0)[0], **others)
    if dp_sync == "mixed":
        assert engine._rank is not None and isinstance(engine._rank.sync, DpSync)
        assert set(engine._rank.sync.plan.modes) == {"early", "zero1"}
    return engine


def make_engine(model: nn.Module, dp_sync: str, settings: dict[str, Any], **others: Any) -> fold3d.Engine:
    """Returns an engine over two replicas; `dp_sync` may be "mixed", as a planner short of memory would have it."""
    mixed = dp_sync == "mixed"
    config = fold3d.ParallelConfig(dp=2, dp_sync="early" if mixed else dp_sync, **settings)
    with _alternating() if mixed else nullcontext():
        return fold3d.Engine(model, config, **others)


@contextmanager
def _alternating() -> Iterator[None]:
    """Every other bucket is synchronised as zero1, the rest early."""

    def make(buckets: Sequence[BucketSpec], *_: Any, **__: Any) -> BucketSchedule:
        modes = ["zero1" if number % 2 else "early" for number in range(1 + max(b.planned for b in buckets))]
        return BucketSchedule.of(buckets, modes, [number for number, mode in enumerate(modes) if mode == "early"])

    plain = BucketSchedule.__dict__["make"]  # the classmethod itself
    BucketSchedule.make = make  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        BucketSchedule.make = plain


def attached(model: nn.Module, dp_sync: str, make: Callable[[Any], Optimizer] = sgd) -> tuple[fold3d.Engine, Optimizer]:
    """Returns an engine with an optimizer attached."""
    engine = engine_of(model, dp_sync)
    optimizer = make(list(engine.owned.values()))
    engine.attach(optimizer)
    return engine, optimizer


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of the parameters as they are."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def own_loop(dp_sync: str, loss: str, norm: bool) -> dict[str, Tensor]:
    """Trains three steps; `loss`: name of a function here."""
    model = build(norm)
    engine, optimizer = attached(model, dp_sync)
    for step in range(3):
        engine.run(batches(step, engine.topology.dp_rank), globals()[loss])
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    found = weights(model)
    engine.close()
    return found


def now_and_then_read(dp_sync: str) -> dict[str, Tensor]:
    """Trains four steps, lazily; gradients are in `.grad` in every other one."""
    model = build()
    engine, optimizer = attached(model, dp_sync)
    for step in range(4):
        read = step % 2 == 1
        parts = batches(step, engine.topology.dp_rank)
        engine.run(parts, share, reads_gradients=read)
        optimizer.step()
    engine.close()
    return weights(model)


def with_two_engines(dp_sync: str) -> dict[str, Tensor]:
    """Trains two steps, each with an engine of its own; the second closes the first and takes the optimizer's state."""
    model = build()
    engine, optimizer = attached(model, dp_sync)
    for step in range(2):
        parts = batches(step, engine.topology.dp_rank)
        engine.run(parts, share)
        optimizer.step()
        if step == 0:
            with engine.whole_optimizer_state():
                saved = copy.deepcopy(optimizer.state_dict())
            engine, optimizer = attached(model, dp_sync)
            optimizer.load_state_dict(saved)
    engine.close()
    return weights(model)


def odd_calls(dp_sync: str) -> dict[str, Tensor]:
    """Two steps, with calls around them that change nothing in torch."""
    model = build()
    engine = engine_of(model, dp_sync)
    optimizer = sgd(list(engine.owned.values()))
    replica = engine.topology.dp_rank
    engine.run(batches(7, replica), share)  # gradients that nobody steps with
    optimizer.zero_grad()
    engine.attach(optimizer)
    optimizer.step()  # before the first run: finds no gradients
    engine.run(batches(7, replica), share)
    engine.clip_grad_norm(1e-3)
    optimizer.zero_grad()  # the step is not taken
    for step in range(2):
        engine.run(batches(step, replica), share)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # finds no gradients
    engine.close()  # brings the weights up to date
    return weights(model)


def replaced(dp_sync: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what `load_state_dict` left after a step, and a submodule's state_dict after the next one."""
    model = build()
    engine, optimizer = attached(model, dp_sync, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    replica = engine.topology.dp_rank
    engine.run(batches(0, replica), share)
    optimizer.step()
    model.load_state_dict(build().state_dict())
    engine.flush()
    loaded = weights(model)
    engine.run(batches(0, replica), share)
    optimizer.step()
    partly = {f"layers.{name}": tensor.clone() for name, tensor in model.layers.state_dict().items()}
    engine.flush()
    whole = weights(model)
    engine.close()
    assert all(torch.equal(whole[name], tensor) for name, tensor in partly.items())
    return loaded, whole


def change_state(dp_sync: str) -> dict[str, Tensor]:
    """Returns weights after four steps, with momentum that is halved, or forgotten, between them."""
    model = build()
    engine, optimizer = attached(model, dp_sync)
    for step in range(4):
        engine.run(batches(step, engine.topology.dp_rank), share)
        optimizer.step()
        with engine.whole_optimizer_state():
            for parameter, state in list(optimizer.state.items()):
                state["momentum_buffer"].mul_(0.5)
                if step == 2 and parameter is model.head.weight:
                    del optimizer.state[parameter]
    engine.flush()
    found = weights(model)
    engine.close()
    return found


def reload_optimizer(dp_sync: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns weights after four steps in one go, and when weights and optimizer move to a second engine in between."""
    model = build()
    engine, optimizer = attached(model, dp_sync)
    replica = engine.topology.dp_rank
    for step in range(2):
        engine.run(batches(step, replica), share)
        optimizer.step()
    with engine.whole_optimizer_state():
        saved, kept = copy.deepcopy(optimizer.state_dict()), weights(model)
    for step in range(2, 4):
        engine.run(batches(step, replica), share)
        optimizer.step()
    engine.close()
    second = build()
    second.load_state_dict(kept)
    engine, optimizer = attached(second, dp_sync)
    optimizer.load_state_dict(saved)
    for step in range(2, 4):
        engine.run(batches(step, replica), share)
        optimizer.step()
    engine.close()
    return weights(model), weights(second)


def low_precision(dp_sync: str, dtype: torch.dtype, scale: float | None) -> tuple[dict[str, Tensor], list[float]]:
    """Five clipped steps of a model in `dtype`; with `scale` through a loss scaler. Returns weights and scales."""
    model = build(dtype=dtype)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    engine = engine_of(model, dp_sync, optimizer=sgd, max_grad_norm=0.1, scaler=scaler)
    scales = []
    for step in range(5):
        parts = batches(step, engine.topology.dp_rank)
        engine.step({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        scales.append(1.0 if scaler is None else scaler.get_scale())
    engine.close()
    return weights(model), scales


class Coupled(torch.optim.SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            torch._foreach_div_(gradients, norm)
        super().step(closure)


def misuse(what: str, dp_sync: str) -> str:
    """Returns the error of a loop that cannot be right."""
    model = build()
    if what == "unfreeze":
        model.embedding.requires_grad_(False)
    try:
        make = (lambda parameters: Coupled(parameters, lr=0.1)) if what == "coupled" else sgd
        engine, optimizer = attached(model, dp_sync, make)
        replica = engine.topology.dp_rank
        if what == "unfreeze":
            model.embedding.requires_grad_(True)
        engine.run(batches(0, replica), share)
        assert all(isinstance(parameter.grad, PendingGradient) for parameter in model.parameters())
        if what == "own gradients":
            model.head.weight.grad = torch.ones_like(model.head.weight)
        if what == "late group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        if what == "moved":
            optimizer.param_groups[0]["params"].pop()
        optimizer.step()
        if what == "state":
            optimizer.state_dict()
        if what == "values":
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
        if what == "replaced":
            optimizer.state = defaultdict(dict)
            engine.run(batches(1, replica), share)
            optimizer.step()
    except Fold3dError as error:
        return str(error)
    return ""
