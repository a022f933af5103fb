"""HookedResults: tells what hooks take of modules inside of blocks from whatever else becomes of their results.

transformers collects attention weights and router logits by hooks on modules inside of its blocks. What reads them
later reads the result of such a module, and a chunk that leaves the block out can show the hooks what it received of
it. That would not help code that keeps the same tensor in another way. So hooks are shown copies, with memory of their
own: who reads a copy has it from a hook.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.errors import TraceError
from fold3d.torch_private import wrap_call
from fold3d.trace.module_results import TreeStructure, Value


@dataclass(frozen=True, kw_only=True, slots=True)
class HookedCall:
    """One call of such a module, in one run of a block."""

    module: str
    call: int
    """As `Value.call`: how often the module had been called before in the forward."""
    place: int
    """How often in this run of the block."""
    structure: TreeStructure
    """Of what it returned."""
    given: tuple[int, ...] = ()
    """Of its first arguments, those that the block was given, each by its number among the leaves of the block's."""


class HookedResults:
    """Of the modules inside of the blocks of `model`, a copy that may be changed."""

    def __init__(self, model: nn.Module, blocks: Iterable[str], noted: Callable[[Value, Tensor], None]) -> None:
        """Args:
        noted: is told of each tensor that hooks are shown, and what it is.
        """
        self._noted = noted
        self._calls, self._places = Counter[str](), Counter[str]()
        self._running: list[HookedCall] | None = None
        self._given: dict[int, int] = {}
        self._originals: dict[Value, tuple[Tensor, int]] = {}
        seen = set[int]()
        for block in blocks:
            for name, module in model.get_submodule(block).named_modules(prefix=block):
                if name != block and id(module) not in seen and not isinstance(module, torch.jit.ScriptModule):
                    seen.add(id(module))
                    self._follow(name, module)

    def begin(self) -> None:
        """A block begins."""
        self._running = []
        self._given = {}
        self._places.clear()

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The block is given these arguments."""
        leaves = enumerate(tree_leaves((args, kwargs)))
        self._given = {id(leaf): number for number, leaf in leaves if isinstance(leaf, Tensor)}

    def end(self) -> tuple[HookedCall, ...]:
        """It ends; returns what its modules' hooks were shown."""
        found, self._running = self._running, None
        return tuple(found or ())

    @property
    def shown(self) -> bool:
        """Whether hooks have been shown anything in the block that runs."""
        return bool(self._running)

    def modified(self, value: Value) -> bool:
        """Whether what hooks were shown has been written to in place since, by whom it was returned to."""
        tensor, version = self._originals[value]
        return tensor._version != version

    def __contains__(self, value: Value) -> bool:
        return value in self._originals

    def _follow(self, name: str, module: nn.Module) -> None:
        forward: Callable[..., Any] = module.forward
        by_hooks: list[bool] = []  # whether hooks follow on the forward that is about to run
        shown: list[tuple[Any, Any]] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            follow = bool(by_hooks) and by_hooks.pop()
            number, place = self._calls[name], self._places[name]
            self._calls[name] += 1
            self._places[name] += 1
            output = forward(*args, **kwargs)
            if not follow:
                return output
            given = tuple(takewhile(lambda one: one >= 0, (self._given.get(id(arg), -1) for arg in args)))
            copies = self._copied(name, number, place, given, output)
            shown.append((copies, output))
            return copies

        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                if self._running is None or not module._forward_hooks:
                    return call(*args, **kwargs)
                by_hooks.append(True)
                before = len(shown)
                result = call(*args, **kwargs)
                if len(shown) == before:
                    return result
                copies, output = shown.pop()
                return output if result is copies else result  # a hook may have put something else in its place

            return called

        module.forward = run
        wrap_call(module, around)

    def _copied(self, name: str, number: int, place: int, given: tuple[int, ...], output: Any) -> Any:
        assert self._running is not None
        try:
            structure = TreeStructure.of(output, name)
        except TraceError:  # nothing that could be put together again
            return output
        copies = tree_map_only(Tensor, Tensor.clone, output)
        self._running.append(HookedCall(module=name, call=number, place=place, structure=structure, given=given))
        pairs = zip(tree_leaves(copies), tree_leaves(output), strict=True)
        tensors = [(copy, one) for copy, one in pairs if isinstance(copy, Tensor)]
        for tensor, (copy, one) in enumerate(tensors):
            value = Value(name, number, tensor)
            self._originals[value] = one, one._version
            self._noted(value, copy)
        return copies
