"""A user's optimizer, stepped bucket by bucket and shard by shard, gives what it gives in one go."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fold3d.data_parallel.bucket import Bucket
from fold3d.data_parallel.optimizer.bucket_optimizer import BucketOptimizer, Settings
from fold3d.data_parallel.optimizer.separable import check_separable
from fold3d.errors import ConfigError
from fold3d.placement.bucket_layout import BucketSpec
from fold3d.topology import Submesh

SHAPES = {"weight": (5, 7), "bias": (7,), "scale": (3, 1, 4), "unused": (6,)}
REPLICAS = 3
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1),
    "adamw-loop": functools.partial(torch.optim.AdamW, lr=0.1, foreach=False, amsgrad=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.1, weight_decay=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.1, momentum=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "adamax": functools.partial(torch.optim.Adamax, lr=0.1),
}


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def model() -> dict[str, Parameter]:
    return {name: Parameter(value) for name, value in draw(0).items()}


def make(name: str, parameters: dict[str, Parameter]) -> Optimizer:
    decayed = [p for n, p in parameters.items() if n == "weight"]
    rest = [p for n, p in parameters.items() if n != "weight"]
    return OPTIMIZERS[name]([{"params": decayed, "weight_decay": 0.3}, {"params": rest}])


def bucket_of(parameters: dict[str, Parameter], rank: int) -> Bucket:
    spec = BucketSpec(
        chunk=0, names=tuple(parameters), modules=(), chunks=(0,), summed_over=Submesh(pp=(0,)), planned=0
    )
    return Bucket(0, spec, parameters, REPLICAS, rank)


def reference(name: str, steps: Iterable[int]) -> dict[str, Parameter]:
    parameters = model()
    optimizer = make(name, parameters)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)
    for step in steps:
        for key, gradient in draw(step).items():
            parameters[key].grad = gradient * 0.25 if key != "unused" else None
        optimizer.step()
        schedule.step()
    return parameters


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sharded", [True, False])
def test_parts_give_the_whole(name: str, sharded: bool) -> None:
    expected = reference(name, range(1, 5))
    for rank in range(REPLICAS if sharded else 1):
        parameters = model()
        optimizer = make(name, parameters)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)
        bucket = bucket_of(parameters, rank)
        bucket.flatten_parameters()
        assert bucket.weights is not None
        pieces = bucket.pieces if sharded else bucket.all_pieces
        targets = [(p, bucket.weights[p.start : p.stop] if sharded else p.parameter) for p in pieces]
        part = BucketOptimizer(optimizer, targets, sharded=sharded)
        for step in range(1, 5):
            gradients = draw(step)
            given = {
                piece.index: (g.flatten()[piece.offset : piece.offset + piece.stop - piece.start] if sharded else g)
                for piece in pieces
                if (g := gradients[piece.name].clone()) is not None and piece.name != "unused"
            }
            settings = Settings.of(optimizer, 0.25)
            optimizer.step()  # finds no gradients: nothing changes
            schedule.step()  # the settings are those of before
            part.step(given, settings)
        for piece in pieces:
            got = parameters[piece.name].detach().flatten()[piece.offset :][: piece.stop - piece.start]
            want = expected[piece.name].detach().flatten()[piece.offset :][: piece.stop - piece.start]
            assert torch.equal(got, want), piece


def test_elementwise_optimizers_are_found_out() -> None:
    for name in OPTIMIZERS:
        check_separable(make(name, model()), parts=True)


class RowNorm(torch.optim.SGD):
    """Divides each gradient by its norm."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm())
        super().step(closure)


class MatricesOnly(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if any(parameter.grad is not None and parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("only 2-D parameters are supported")
        super().step(closure)


class Blockwise(torch.optim.SGD):
    """Divides each 256 elements of a large gradient by their largest, as optimizers with 8-bit state do."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel() >= 4096:
                    blocks = parameter.grad.flatten().split(256)
                    parameter.grad = torch.cat([block / block.abs().max() for block in blocks]).view_as(parameter)
        super().step(closure)


class Coupled(torch.optim.SGD):
    """Divides all gradients by their common norm, in groups that ask for it."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = [parameter.grad for parameter in group["params"] if parameter.grad is not None]
            if gradients and group.get("coupled"):
                torch._foreach_div_(gradients, torch.stack([g.norm() for g in gradients]).norm())
        super().step(closure)


def test_an_optimizer_that_looks_at_whole_matrices_may_not_be_cut() -> None:
    parameters = [Parameter(torch.ones(2, 2))]
    for kind in (RowNorm, MatricesOnly):
        check_separable(kind(parameters, lr=0.0), parts=False)
    with pytest.raises(ConfigError, match=r"RowNorm gives other numbers.*early"):
        check_separable(RowNorm(parameters, lr=0.0), parts=True)
    check_separable(Blockwise(parameters, lr=0.0), parts=False)
    with pytest.raises(ConfigError, match=r"Blockwise gives other numbers.*early"):
        check_separable(Blockwise(parameters, lr=0.0), parts=True)
    with pytest.raises(ConfigError, match=r"MatricesOnly cannot do .*only 2-D"):
        check_separable(MatricesOnly(parameters, lr=0.1), parts=True)
    with pytest.raises(ConfigError, match=r"tp=2 steps parts of parameters, but RowNorm gives other .*; set tp=1"):
        check_separable(RowNorm(parameters, lr=0.0), parts=False, tp=2)
    check_separable(make("adamw", model()), parts=False, tp=2)


class Lookahead(torch.optim.SGD):
    """Has another optimizer step its parameters."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.AdamW(parameters)


def test_an_optimizer_that_wraps_another_may_not_be_cut() -> None:
    parameters = [Parameter(torch.ones(2, 2))]
    for where in ({"parts": True}, {"parts": False, "on_host": True}):
        with pytest.raises(ConfigError, match=r"Lookahead has another optimizer do it .'inner'."):
            check_separable(Lookahead(parameters), **where)


def test_an_optimizer_that_looks_at_all_parameters_is_refused() -> None:
    groups = [{"params": [Parameter(torch.ones(2))]}, {"params": [Parameter(torch.ones(2))], "coupled": True}]
    check_separable(Coupled(groups[:1], lr=0.1), parts=True)
    with pytest.raises(ConfigError, match=r"Coupled gives other numbers for parameters together"):
        check_separable(Coupled(groups, lr=0.1), parts=False)
    with pytest.raises(ConfigError, match=r"LBFGS keeps parameters in '_params'"):
        check_separable(torch.optim.LBFGS([Parameter(torch.ones(2))]), parts=False)


class Distance(torch.optim.SGD):
    """Estimates its step size from how far all parameters have come, from almost nothing, as D-Adaptation does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("d", 1e-6)
            come, total = 0.0, 0.0
            for parameter in group["params"]:
                if parameter.grad is not None:
                    start = self.state[parameter].setdefault("start", parameter.detach().clone())
                    come += float((parameter.grad * (start - parameter.detach())).sum())
                    total += float(parameter.grad.abs().sum())
            group["d"] = max(group["d"], come / max(total, 1e-12))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["d"])


class TwoModes(torch.optim.SGD):
    """Steps only in the mode for training, as schedule-free optimizers do."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, lr=lr)  # type: ignore[arg-type]
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        super().step(closure)


class Particular(torch.optim.SGD):
    """Steps parameters of one dtype only, as optimizers with kernels for one device do."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert all(parameter.dtype == torch.float64 for parameter in group["params"]), "only float64"
        super().step(closure)


def test_what_is_estimated_from_all_parameters_is_found_out() -> None:
    with pytest.raises(ConfigError, match=r"Distance gives other numbers for parameters together"):
        check_separable(Distance([Parameter(torch.ones(2))], lr=1.0), parts=False)


class Counts(torch.optim.SGD):
    """Counts its steps in its groups: all, or those in which a parameter has a gradient."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["each"] or any(parameter.grad is not None for parameter in group["params"]):
                group["k"] = group.get("k", 0) + 1
        super().step(closure)


def test_who_counts_steps_with_gradients_in_its_groups_is_refused() -> None:
    """The groups are those of the user's optimizer, which finds no gradients where others step for it."""
    parameters = [Parameter(torch.ones(2))]
    check_separable(Counts([{"params": parameters, "each": True}], lr=0.1), parts=True)
    with pytest.raises(ConfigError, match=r"Counts changes 'k' in its parameter groups only in a step with gradients"):
        check_separable(Counts([{"params": parameters, "each": False}], lr=0.1), parts=False)


def test_it_is_tried_as_it_will_be_used() -> None:
    """In the mode for training, in the dtype and on the device of its parameters, and drawing no random numbers."""
    check_separable(TwoModes([Parameter(torch.ones(2))], lr=0.1), parts=False)
    with pytest.raises(ConfigError, match=r"TwoModes computes the weights for evaluation.*early"):
        check_separable(TwoModes([Parameter(torch.ones(2))], lr=0.1), parts=True)
    check_separable(Particular([Parameter(torch.ones(2, dtype=torch.float64))], lr=0.1), parts=True)
    before = torch.get_rng_state()
    check_separable(make("adamw", model()), parts=True)
    assert torch.equal(before, torch.get_rng_state())


def test_the_probe_leaves_the_optimizer_alone() -> None:
    parameters = model()
    optimizer = make("adamw", parameters)
    before = copy.deepcopy(optimizer.state_dict())
    check_separable(optimizer, parts=True)
    assert optimizer.state_dict() == before
