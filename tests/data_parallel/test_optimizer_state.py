"""WatchedState: an optimizer's state of which replicas have parts is not taken for all there is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

from fold3d.data_parallel.optimizer.state import WatchedState
from fold3d.errors import ConfigError

HERE, APART = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
ABOUT_ALL: list[Callable[[Any], Any]] = [
    lambda state: list(state),
    len,
    bool,
    lambda state: state.keys(),
    lambda state: state.values(),
    lambda state: state.items(),
    lambda state: state.clear(),
    lambda state: state.update({}),
    copy.deepcopy,
    copy.copy,
]
ABOUT_ONE: list[Callable[[Any, Any], Any]] = [
    lambda state, key: state[key],
    lambda state, key: state.get(key),
    lambda state, key: key in state,
    lambda state, key: state.setdefault(key, {}),
    lambda state, key: state.__setitem__(key, {}),
    lambda state, key: state.pop(key, None),
]


def made(is_whole: bool) -> WatchedState:
    return WatchedState({HERE: {"step": 1}}, [APART], lambda: is_whole, lambda: None)


@pytest.mark.parametrize("look", ABOUT_ALL)
def test_all_of_it_is_there_only_when_it_is_whole(look: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="whole_optimizer_state"):
        look(made(False))
    look(made(True))


@pytest.mark.parametrize("look", ABOUT_ONE)
def test_that_of_other_parameters_is_there(look: Callable[[Any, Any], Any]) -> None:
    look(made(False), HERE)
    with pytest.raises(ConfigError, match="each replica keeps a part"):
        look(made(False), APART)


def test_an_optimizer_works_with_it_and_a_copy_has_a_plain_one() -> None:
    optimizer = SGD([HERE], lr=0.1, momentum=0.9)
    optimizer.state = made(True)
    HERE.grad = torch.ones(2)
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert type(copied.state) is not WatchedState
    assert [sorted(one) for one in copied.state.values()] == [["momentum_buffer", "step"]]
    assert optimizer.state_dict()["state"].keys() == {0}
