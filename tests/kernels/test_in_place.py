"""What an operator of fold3d writes to counts a version, by which autograd knows that a tensor was overwritten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fold3d import _C

OPS = torch.ops.fold3d


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def adamw_arguments(weight: Tensor, master: Tensor) -> tuple[Any, ...]:
    lists = [[weight], *([ones(3)] for _ in range(3)), [torch.tensor(1.0)], [master]]
    return (*lists, torch.tensor(1.0, dtype=torch.float64), 1e-2, 0.9, 0.99, 1e-8, 0.1)


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "squares": lambda: (ones(3), ones(2, dtype=torch.float64)),
    "adamw_": lambda: adamw_arguments(ones(3, dtype=torch.bfloat16), ones(3)),
    "pack": lambda: ([ones(3), ones(2)], [0, 16], ones(32, dtype=torch.uint8)),
    "unpack": lambda: (ones(32, dtype=torch.uint8), [0, 16], [ones(3), ones(2)]),
    "tp_all_reduce_start_": lambda: (ones(3), "in place"),
}


def written_arguments() -> dict[str, list[int]]:
    """Returns which arguments each operator says that it writes to."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        places = [i for i, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write]
        if schema.name.startswith("fold3d::") and places:
            found[schema.name.removeprefix("fold3d::")] = places
    return found


def test_here_are_all_of_them() -> None:
    assert written_arguments().keys() == ARGUMENTS.keys()


@pytest.fixture(scope="module")
def _group() -> Iterator[None]:
    """A group "in place" of two ranks, of which this is the first."""
    peers = [_C.RingPeers(rank, 2, "127.0.0.1", "s" * 32, tensor_parallel=True) for rank in range(2)]
    thread = threading.Thread(target=peers[1].connect, args=(("127.0.0.1", peers[0].port), 30.0))
    thread.start()
    peers[0].connect(("127.0.0.1", peers[1].port), 30.0)
    thread.join()
    sync = _C.TensorSync("in place", 0, 2, _C.NicArbiter(), 30.0, "rank 0", peers=peers[0])
    yield
    sync.close()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_written_to_counts_a_version(name: str) -> None:
    arguments = ARGUMENTS[name]()
    tensors = [(place, one) for place, given in enumerate(arguments) for one in _tensors_of(given)]
    before = [one._version for _, one in tensors]
    getattr(OPS, name)(*arguments)
    for (place, one), version in zip(tensors, before, strict=True):
        assert one._version == version + (place in written_arguments()[name]), (name, place)


def test_a_backward_after_a_step_does_not_use_the_new_weight() -> None:
    weight = ones(3, dtype=torch.bfloat16).requires_grad_()
    x = ones(3, dtype=torch.bfloat16).requires_grad_()
    loss = (x * weight).sum()
    with torch.no_grad():
        OPS.adamw_(*adamw_arguments(weight, ones(3)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _tensors_of(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [one for one in given if isinstance(one, Tensor)] if isinstance(given, list) else []
