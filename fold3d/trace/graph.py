"""trace_graph(): chooses, for a model of any structure, the modules between which it may be cut.

The idea is Merak's (Lai et al., "Merak: An Efficient Distributed DNN Training Framework with Automated 3D Parallelism",
section 4.2, Algorithms 1 and 2), over the graph of module calls instead of the graph of operations. There a subgraph
ends where only one value, besides those that many nodes read, is needed by what follows; a bound on the number of
subgraphs keeps them from being smaller than a share of the model. Here

- modules are opened from the outside in, as long as they hold more than that share of the work;
- one is opened only if no more tensors have to leave it when the modules inside of it stand for it: its farthest
  dependencies lie in its last modules. One whose own code adds up what those return stays whole;
- of cuts that lie nearer to each other than the share, those stay that the fewest tensors and bytes cross. Values that
  are read all over the model cross all of them alike and so decide nothing.

What crosses each cut, and whether the model can be cut there at all, is said by the same recording as for blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fold3d.errors import TraceError
from fold3d.trace.model_trace import Trace
from fold3d.trace.recorder import flops_of


class CallTree(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode and module hooks around one forward of `model` (a copy whose tensors are fake)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack: list[str] = []
        self._calls: dict[str, int] = {}
        self._called_by: dict[str, list[str]] = {}
        self._flops: dict[str, int] = {}
        self._parameters = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(name), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._calls[name] = self._calls.get(name, 0) + 1
            if self._stack:
                self._called_by.setdefault(self._stack[-1], []).append(name)
            self._stack.append(name)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flops = flops_of(func.overloadpacket, args, kwargs, result)
        if flops:
            for name in dict.fromkeys(self._stack):
                self._flops[name] = self._flops.get(name, 0) + flops
        return result

    def inside(self, name: str) -> list[str]:
        """Returns the modules with parameters that module `name` ("": the model) calls itself, in the order in which
        they run: those of its own that run once in the forward pass."""
        prefix = f"{name}." if name else ""
        return [
            one
            for one in dict.fromkeys(self._called_by.get(name, ()))
            if one.startswith(prefix) and self._calls[one] == 1 and self._parameters[one]
        ]

    def share(self, name: str) -> float:
        """Returns the larger one of a module's shares in the model's FLOPs and in its parameters."""
        flops = self._flops.get(name, 0) / max(1, self._flops.get("", 0))
        return float(max(flops, self._parameters[name] / max(1, self._parameters[""])))


SHARDS = 32
"""A module with less than one in so many of the model's FLOPs and parameters is not opened, where few chunks are asked
for."""
_SHARDS_A_CHUNK = 2

Record = Callable[[list[str]], Trace]
"""Records the forward with modules of these names as the blocks. Raises: TraceError."""


def trace_graph(model: nn.Module, tree: CallTree, record: Record, chunks: int) -> Trace:
    """Returns a recording whose blocks are the modules that were chosen.

    Args:
        tree: of the same forward.
        chunks: into which the model is to be cut; the more, the smaller the modules.
    Raises: TraceError when there is no place to cut.
    """
    units = tree.inside("")
    if not units:
        raise TraceError(
            f'partition="graph": {type(model).__name__} calls no module with parameters exactly once, so there is '
            "nothing between which it could be cut. Set pp=1 and segments=1."
        )
    shards = max(SHARDS, _SHARDS_A_CHUNK * chunks)
    found = record(units)
    whole: set[Hashable] = set()
    while True:
        chosen = [
            unit
            for unit in found.blocks
            if tree.share(unit) > 1 / shards and tree.inside(unit) and _kind(model, unit) not in whole
        ]
        opened = _open(model, tree, record, found, chosen, whole)
        if opened is None:
            break
        found = opened
    closed = _bounded(found, tree, shards)
    if not any(not reason for reason in closed.borders[1:]):
        why = next((reason for reason in closed.borders[1:] if reason), "all of its work is done in one module")
        raise TraceError(
            f'partition="graph" found no place to cut {type(model).__name__}: {why}. Name the modules that run in '
            "order, partition=[...], or set pp=1 and segments=1."
        )
    return closed


def _open(
    model: nn.Module, tree: CallTree, record: Record, found: Trace, chosen: list[str], whole: set[Hashable]
) -> Trace | None:
    """Returns the recording with those of the `chosen` units opened that can be; None if none can. Adds to `whole` the
    kinds of the others: what holds for one holds for those that are made alike, and need not be tried."""
    while chosen:
        inside = {unit: tree.inside(unit) for unit in chosen}
        try:
            opened = record([name for unit in found.blocks for name in inside.get(unit, [unit])])
        except TraceError:  # some modules do not run one after the other; which of them is found one kind at a time
            if len({_kind(model, unit) for unit in chosen}) == 1:
                bad = chosen[0]
            else:
                kind = _kind(model, chosen[0])
                alike = [unit for unit in chosen if _kind(model, unit) == kind]
                return _open(model, tree, record, found, alike, whole) or _open(
                    model, tree, record, found, [unit for unit in chosen if unit not in alike], whole
                )
        else:
            worse = (unit for unit in chosen if _is_worse(found, unit, opened, inside[unit]))
            first = next(worse, None)
            if first is None:
                return opened
            bad = first
        whole.add(_kind(model, bad))
        chosen = [unit for unit in chosen if _kind(model, unit) not in whole]
    return None


def _is_worse(before: Trace, unit: str, after: Trace, inside: list[str]) -> bool:
    """Whether more has to leave the unit when the modules inside stand for it, or cannot be handed on."""
    old = before.blocks.index(unit) + 1
    new = max(after.blocks.index(name) for name in inside) + 1
    if old == len(before.blocks) or new == len(after.blocks):
        return False
    if after.borders[new]:
        return not before.borders[old]
    return not before.borders[old] and len(after.crossings[new]) > len(before.crossings[old])


def _bounded(found: Trace, tree: CallTree, shards: int) -> Trace:
    """Returns the recording without those cuts that have another one near them which less crosses."""
    ends = list(accumulate(tree.share(unit) for unit in found.blocks))
    places = {border: ends[border - 1] / ends[-1] for border in range(1, len(ends)) if not found.borders[border]}

    def crossing(border: int) -> tuple[int, int]:
        crossings = found.crossings[border]
        return len(crossings), sum(one.bytes for one in crossings)

    kept: list[int] = []
    reasons = list(found.borders)
    for border in sorted(places, key=crossing):
        better = [
            other
            for other in kept
            if abs(places[other] - places[border]) < 1 / shards and crossing(other) < crossing(border)
        ]
        if better:
            tensors, size = crossing(border)
            fewer, less = crossing(better[0])
            reasons[border] = (
                f"{tensors} tensors of {size:,} bytes would cross it, and {fewer} of {less:,} bytes cross "
                f"the one before '{found.blocks[better[0]]}'"
            )
        else:
            kept.append(border)
    return replace(found, borders=tuple(reasons))


def _kind(model: nn.Module, name: str) -> Hashable:
    """Returns what is equal for modules that are made alike."""
    return tuple((path, type(module)) for path, module in model.get_submodule(name).named_modules())
