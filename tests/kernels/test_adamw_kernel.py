"""The AdamW kernel against torch.optim.AdamW, and against its own definition in fp64."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fold3d.data_parallel.optimizer.bucket_optimizer import step_by_kernel
from fold3d.data_parallel.optimizer.separable import check_steps
from fold3d.errors import ConfigError

OPS = torch.ops.fold3d
SHAPES = [(5, 7), (33,), (), (2, 3, 4), (0,), (1000,)]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fused": True},
    "loop": {"foreach": False},
    "settings": {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    "no decay": {"weight_decay": 0.0},
    "tensor lr": {"lr": torch.tensor(1e-2, dtype=torch.float64), "foreach": False},
}


def parameters(dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made.append(Parameter(torch.randn(6, 4, generator=generator).to(dtype).t()))  # elements lie in another order
    return made


def gradients(step: int, weights: list[Parameter]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(one.shape, generator=generator).to(one.dtype) for one in weights]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_are_those_of_torch(way: str, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizers = [torch.optim.AdamW(one, **{"lr": 1e-2} | WAYS[way]) for one in (ours, theirs)]
    check_steps(optimizers[0])
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    for step in range(6):
        given = gradients(step, ours)
        kept = [one.clone() for one in given]
        unused = step % 2  # a parameter that a step did not use stays behind the others in its count
        step_by_kernel(
            optimizers[0], {p: g for k, (p, g) in enumerate(zip(ours, given, strict=True)) if k or not unused}, 0.3
        )
        for k, (p, g) in enumerate(zip(theirs, given, strict=True)):
            p.grad = torch.empty_like(p).copy_(g * 0.3) if k or not unused else None
        optimizers[1].step()
        assert all(torch.equal(*both) for both in zip(given, kept, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        mine, wanted = (optimizers[k].state[p] for k, p in enumerate((one, other)))
        assert mine.keys() == wanted.keys()
        for key, value in wanted.items():
            assert mine[key].dtype == value.dtype and mine[key].stride() == value.stride()
            torch.testing.assert_close(mine[key], value, rtol=max(tolerance, 1e-5), atol=tolerance)


def test_it_goes_on_with_a_state_of_torch_and_back() -> None:
    weights = parameters(torch.float32)
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    for p, g in zip(weights, gradients(0, weights), strict=True):
        p.grad = torch.empty_like(p).copy_(g)
    optimizer.step()
    ours, theirs = copy.deepcopy((weights, optimizer.state_dict())), (weights, optimizer.state_dict())
    again = torch.optim.AdamW(ours[0], lr=1e-2)
    again.load_state_dict(ours[1])
    for step in (1, 2):
        given = gradients(step, weights)
        if step == 1:
            step_by_kernel(again, dict(zip(ours[0], given, strict=True)), 1.0)
        else:
            for p, g in zip(ours[0], given, strict=True):
                p.grad = torch.empty_like(p).copy_(g)
            again.step()
        for p, g in zip(theirs[0], given, strict=True):
            p.grad = torch.empty_like(p).copy_(g)
        optimizer.step()
    for one, other in zip(ours[0], weights, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def call(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, master: Tensor | None) -> None:
    scale = torch.tensor(0.5, dtype=torch.float64)
    masters = [] if master is None else [master]
    OPS.adamw_([weight], [gradient], [mean], [square], [step], masters, scale, 1e-2, 0.9, 0.99, 1e-8, 0.1)


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16])
def test_master_weights(gradient_dtype: torch.dtype, moment_dtype: torch.dtype) -> None:
    """A bfloat16 weight follows its master, which goes as a float32 weight with the same gradients goes."""
    master = torch.randn(500)
    alone = master.clone()
    weight = master.to(torch.bfloat16)
    moments = [torch.zeros(500, dtype=moment_dtype) for _ in range(2)]
    plain = [torch.zeros(500) for _ in range(2)]
    for step in range(1, 5):
        gradient = torch.randn(500).to(gradient_dtype)
        number = torch.tensor(float(step))
        call(weight, gradient, *moments, number, master)
        call(alone, gradient, *plain, number, None)
        assert torch.equal(weight, master.to(torch.bfloat16))
    tolerance = 1e-6 if moment_dtype == torch.float32 else 1e-2
    torch.testing.assert_close(master, alone, rtol=0, atol=tolerance)
    if moment_dtype == torch.float32:
        assert torch.equal(master, alone)


def test_a_small_update_is_not_lost_in_the_master() -> None:
    weight, master = torch.ones(8, dtype=torch.bfloat16), torch.ones(8)
    moments = [torch.zeros(8) for _ in range(2)]
    for step in range(1, 4):
        scale = torch.tensor(1.0, dtype=torch.float64)
        number = torch.tensor(float(step))
        OPS.adamw_(
            [weight], [torch.ones(8)], *[[m] for m in moments], [number], [master], scale, 1e-4, 0.9, 0.999, 0, 0
        )
    assert torch.equal(weight, torch.ones(8, dtype=torch.bfloat16)) and float(master[0]) == pytest.approx(1 - 3e-4)


def test_bad_arguments_are_named() -> None:
    w, step = torch.ones(4), torch.tensor(1.0)
    for arguments, text in [
        ((w, torch.ones(5), w.clone(), w.clone(), step, None), "gradient 0 must lie in memory as its weight"),
        ((w, w.double(), w.clone(), w.clone(), step, None), "no kernel for weights of"),
        ((w, w.clone(), w.clone(), w.bfloat16(), step, None), "mean of squares 0 is"),
        ((w, w.clone(), w.clone(), w.clone(), torch.ones(2), None), "a step must be one number"),
        ((w.half(), w.half(), w.half(), w.half(), step, None), "not Half|float16"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            call(*arguments)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (functools.partial(torch.optim.SGD, lr=0.1), "the optimizer is SGD"),
        (functools.partial(torch.optim.AdamW, amsgrad=True), "amsgrad=True"),
        (functools.partial(torch.optim.AdamW, maximize=True), "maximize=True"),
        (functools.partial(torch.optim.Adam, weight_decay=0.1), "adds the decay to gradients"),
    ],
)
def test_other_optimizers_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        check_steps(make([Parameter(torch.ones(3))]))
    assert 'kernels="torch"' in str(caught.value)
    with pytest.raises(ConfigError, match="float16"):
        check_steps(torch.optim.AdamW([Parameter(torch.ones(3).half())]))
