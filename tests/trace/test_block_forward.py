"""BlockForward: what a block's forward in C++ returns by itself, and how it behaves as an attribute of a module."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fold3d._C import BlockForward, CurrentForward, ForwardCursor, block_forward


def make(slot: CurrentForward, block: int = 0) -> BlockForward:
    """Returns one that otherwise tells its arguments."""
    return block_forward(slot, block, 7, lambda *args, **kwargs: (args, kwargs), print)


def test_returns_what_was_received_where_the_block_is_skipped() -> None:
    slot, received = CurrentForward(), object()
    forward = make(slot)
    slot.begin(ForwardCursor(1, None, []), received)
    assert forward("x", mask=3) is received
    assert forward("x", mask=3) == (("x",), {"mask": 3}), "it is not the next block any more"


def test_calls_the_function_when_no_passage_is_under_way() -> None:
    slot = CurrentForward()
    forward = make(slot)
    assert forward(1, 2, a=3) == ((1, 2), {"a": 3})
    slot.begin(ForwardCursor(1, None, []), None)
    slot.end()
    assert forward() == ((), {})


def test_calls_the_function_in_unusual_surroundings() -> None:
    slot = CurrentForward()
    slot.begin(ForwardCursor(1, None, []), "received")
    forward = make(slot)
    with torch.no_grad():
        assert forward(1) == ((1,), {})
    assert forward(1) == "received"


def test_an_exception_of_the_function_is_its_own() -> None:
    def fail() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        block_forward(CurrentForward(), 0, 0, fail, fail)()


def test_the_slot_keeps_the_passage_until_the_end() -> None:
    slot = CurrentForward()
    slot.begin(ForwardCursor(2, None, []), 1)  # nobody else holds it
    gc.collect()
    assert make(slot)() == 1
    slot.end()


def test_needs_a_slot_and_is_made_by_the_function_only() -> None:
    with pytest.raises(TypeError, match="incompatible"):
        block_forward(None, 0, 0, print, print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="incompatible"):
        block_forward(CurrentForward(), 0, 0, None, print)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BlockForward()


def test_shows_the_signature_of_the_function() -> None:
    assert str(inspect.signature(make(CurrentForward()))) == "(*args, **kwargs)"


def test_is_collected_with_the_module_that_it_belongs_to() -> None:
    module = nn.Linear(1, 1)
    module.forward = block_forward(CurrentForward(), 0, 0, module.forward, module.forward)
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_module_run_themselves(how: Callable[[nn.Module], nn.Module]) -> None:
    module = nn.Linear(1, 1)
    x = torch.ones(1, 1)
    want = module(x)
    module.forward = block_forward(CurrentForward(), 0, 0, lambda _: torch.zeros(1, 1), module.forward)
    copied = how(module)
    assert torch.equal(module(x), torch.zeros(1, 1)) and torch.equal(copied(x), want)
    with torch.no_grad():
        copied.weight += 1
    assert torch.equal(copied(x), want + 1) and not torch.equal(copied.weight, module.weight)


def test_never_skips_with_a_negative_number() -> None:
    slot = CurrentForward()
    slot.begin(ForwardCursor(1, None, []), "received")
    assert make(slot, -1)("x") == (("x",), {})
