"""torch.ops.fold3d.tp_*: what torch asks of an operator, and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fold3d.tensor_parallel.group import TensorParallelGroup
from tests.helpers.ranks import RankPool
from tests.tensor_parallel.test_group import TRANSPORTS, mine, on_all, summed

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def checks(group: TensorParallelGroup) -> dict[str, dict[str, str]]:
    """All of torch's checks of each operator, run by both ranks at once."""
    ops = torch.ops.fold3d
    x = mine(group.rank, 2, 3, 4).requires_grad_()
    plain = x.detach()
    arguments: dict[str, tuple[Any, ...]] = {
        "tp_copy_to_region": (x, group.name),
        "tp_reduce_from_region": (x, group.name),
        "tp_all_reduce": (plain, group.name, "max"),
        "tp_all_gather": (x, 1, 6, group.name),
        "tp_reduce_scatter": (x, 0, group.name),
        "tp_scatter": (x, -1, group.name),
    }
    return {
        name: torch.library.opcheck(getattr(ops, name).default, given, test_utils=CHECKS, raise_exception=False)
        for name, given in arguments.items()
    }


@pytest.mark.gate
def test_the_operators_are_what_torch_expects(ranks: RankPool) -> None:
    for results in ranks.run(on_all, 2, True, checks, timeout=200):
        assert results == dict.fromkeys(results, dict.fromkeys(CHECKS, "SUCCESS"))


def checks_of_started(group: TensorParallelGroup) -> list[dict[str, str]]:
    ops = torch.ops.fold3d
    x = mine(group.rank, 2, 4)
    handle = ops.tp_all_reduce_start(x, group.name)
    part, whole = ops.tp_reduce_scatter_start(x, 1, group.name), ops.tp_all_gather_start(x, 1, 8, group.name)
    assert torch.equal(ops.tp_wait(part, x, [2, 2]), ops.tp_reduce_scatter(x, 1, group.name))
    assert torch.equal(ops.tp_wait(whole, x, [2, 8]), ops.tp_all_gather(x, 1, 8, group.name))
    with pytest.raises(ValueError, match="no handle of an exchange"):
        ops.tp_finish(torch.tensor([-1]))
    # What checks an operator calls it several times: a handle may be waited for more than once.
    verdicts = [
        torch.library.opcheck(ops.tp_wait.default, (handle, x.requires_grad_(), [2, 4]), test_utils=CHECKS),
        torch.library.opcheck(ops.tp_finish.default, (handle,), test_utils=CHECKS),
        # What it returns has another number each time.
        torch.library.opcheck(ops.tp_all_reduce_start.default, (x.detach(), group.name), test_utils=CHECKS[:3]),
    ]
    summed(group, x)  # nobody waits for what that started: who left now would end the other rank's, too
    return verdicts


def test_so_are_those_that_start_and_wait(ranks: RankPool) -> None:
    for results in ranks.run(on_all, 2, True, checks_of_started, timeout=200):
        assert {verdict for result in results for verdict in result.values()} == {"SUCCESS"}


def compiled(group: TensorParallelGroup) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    up, down = mine(group.rank, 6, 8) / 50, mine(group.rank, 8, 6) / 50

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ops, name = torch.ops.fold3d, group.name
        y = ops.tp_reduce_from_region((ops.tp_copy_to_region(x, name) @ up).tanh() @ down, name)
        part = ops.tp_reduce_scatter(y, 1, name)
        whole: Tensor = ops.tp_all_gather(part * 2, 1, 4, name)
        return whole

    def run(function: Any) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
        out = function(*leaves)
        out.pow(2).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    torch._dynamo.reset()
    one = run(block)
    other = run(torch.compile(block, backend="aot_eager", fullgraph=True))
    return tuple((a - b).abs().max() for a, b in zip(one, other, strict=True))


@TRANSPORTS
def test_compiled_blocks_communicate_as_they_are(ranks: RankPool, over_tcp: bool) -> None:
    for errors in ranks.run(on_all, 2, over_tcp, compiled, timeout=200):
        assert len(errors) == 4 and max(errors) == 0.0


def bad_calls(group: TensorParallelGroup) -> list[str]:
    ops, texts = torch.ops.fold3d, []
    for call in (
        lambda: ops.tp_all_reduce(torch.ones(3, dtype=torch.bool), group.name, "sum"),
        lambda: ops.tp_all_reduce(torch.ones(3), group.name, "min"),
        lambda: ops.tp_all_gather(torch.ones(3), 0, 4, group.name),
        lambda: ops.tp_all_reduce_start_(torch.ones(3, 4).T, group.name),
        lambda: ops.tp_all_reduce(torch.ones(3), "nobody", "sum"),
    ):
        with pytest.raises(Exception) as error:
            call()
        texts.append(str(error.value))
    return texts


def test_calls_that_cannot_work_say_why(ranks: RankPool) -> None:
    for kind, op, length, strided, name in ranks.run(on_all, 2, True, bad_calls):
        assert "not Bool" in kind and 'op="min"' in op and "bytes, not" in length
        assert "contiguous" in strided and "nobody" in name
