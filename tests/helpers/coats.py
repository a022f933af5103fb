"""What is on the modules of a model."""

from __future__ import annotations

import contextlib
import itertools
from types import MethodType
from typing import Any

from torch import nn

from fold3d._C import BlockForward
from fold3d.trace.coat import Hook, Wrap, row_of

Look = dict[str, tuple[type[nn.Module], dict[str, Any]]]


def look(model: nn.Module, *, stays: frozenset[Wrap] = frozenset()) -> Look:
    """Returns the class and the entries of `vars()` of each module: to be compared with others, but for parameters.

    Args:
        stays: rows whose hooks are left out.
    """
    found: Look = {}
    for name, module in model.named_modules():
        own = {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        own["_parameters"] = list(module._parameters)
        for key in [key for key in own if key.endswith("_hooks")]:
            own[key] = {n: hook for n, hook in own[key].items() if getattr(hook, "row", None) not in stays}
        found[name] = type(module), own
    return found


def rows_on(model: nn.Module) -> set[Wrap]:
    """Returns the rows of all forwards and hooks on the modules.

    Raises: AssertionError for one that is of no row, or for forwards that do not lie in the table's order.
    """
    found = set[Wrap]()
    for module in model.modules():
        own, rows = vars(module).get("forward"), list[Wrap]()
        while isinstance(own, BlockForward):
            rows.append(row_of(own))
            own = own.__wrapped__.__wrapped__  # type: ignore[attr-defined]
        assert own is None or own == MethodType(type(module).forward, module), f"{own} is no row's"
        assert all(outer.may_be_on(inner) for outer, inner in itertools.pairwise(rows)), rows
        found.update(rows)
        for kind in [one for one in vars(module) if one.endswith("_hooks")]:
            for hook in vars(module)[kind].values():
                hook = getattr(hook, "hook", hook)  # torch wraps those of load_state_dict
                if not _is_left_of_one(hook):
                    assert isinstance(hook, Hook), f"{hook} is no row's"
                    assert hook.row is not None
                    found.add(hook.row)
    return found


def _is_left_of_one(hook: Any) -> bool:
    """Whether a copy, deep or pickled, has it in the place of a hook of the coat."""
    if isinstance(hook, MethodType):
        return isinstance(hook.__self__, contextlib.nullcontext)
    return isinstance(hook, Hook) and hook.row is None
