"""What a loss function keeps in its trainer, on its way to other processes."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict
from typing import Any

import pytest

from fold3d.trainer.loss_state import _with_factories, _without_factories


def metrics() -> Any:
    return defaultdict(lambda: defaultdict(list))


def test_factories_that_cannot_travel_are_the_receivers() -> None:
    sent = metrics()
    sent["train"]["rewards"] += [1.0, 2.0]
    with pytest.raises(Exception, match="pickle"):
        pickle.dumps(sent)
    found = _with_factories(pickle.loads(pickle.dumps(_without_factories(sent))), metrics())
    assert found == sent
    found["eval"]["losses"].append(3.0)
    found["train"]["margins"].append(4.0)
    assert found["eval"]["losses"] == [3.0]


@pytest.mark.parametrize(
    "value",
    [3, [1, {"a": 2.0}], {"a": {"b": (1, 2)}}, OrderedDict(a=1), [defaultdict(list, a=[1])], {"x": defaultdict(int)}],
)
def test_whatever_else_is_kept_arrives_as_it_is(value: Any) -> None:
    found = _with_factories(pickle.loads(pickle.dumps(_without_factories(value))), None)
    assert found == value
    assert type(found) is type(value)
