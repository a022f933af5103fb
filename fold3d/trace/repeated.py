"""Blocks that repeat: which are made alike (kinds_of), and which need not run on tensors without values (Twins).

Giant models repeat one block a hundred times. Where a forward, and a backward, only count bytes or see shapes, the
third and later ones of their kind between others of the same kinds are left out: a stand-in returns tensors as its
twin's, and gradients of its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fold3d.trace.arguments import form_of
from fold3d.trace.model_trace import Trace


@dataclass(frozen=True, slots=True)
class Like:
    """What a tensor is like, but for its values and its strides."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def like(leaf: Any) -> Any:
    """Returns a tensor's Like, and anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return Like(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)


def kinds_of(blocks: Sequence[nn.Module], work: Sequence[Any]) -> list[int]:
    """Returns a number per block, equal for those that are made alike: of the same modules with equal settings, but for
    whole numbers that count the blocks; and do the same.

    Args:
        work: what is known of what each does, such as FLOPs.
    """
    known: list[tuple[int, Any, list[int]]] = []
    found = []
    for place, (block, does) in enumerate(zip(blocks, work, strict=True)):
        made, numbers = _made_of(block)
        for kind, (first, other, others) in enumerate(known):
            offsets = {one - two for one, two in zip(numbers, others, strict=False)}
            if other == (made, does) and len(numbers) == len(others) and offsets <= {0, place - first}:
                found.append(kind)
                break
        else:
            found.append(len(known))
            known.append((place, (made, does), numbers))
    return found


def _made_of(block: nn.Module) -> tuple[list[Any], list[int]]:
    made: list[Any] = []
    numbers: list[int] = []
    for path, module in block.named_modules():
        tensors = [*module._parameters.items(), *module._buffers.items()]
        made.append((path, type(module), [(key, x if x is None else like(x)) for key, x in tensors]))
        for key, value in vars(module).items():
            if isinstance(value, (bool, float, str, type(None))):
                made.append((key, value))
            elif isinstance(value, int):
                made.append(key)
                numbers.append(value)
    return made, numbers


class Twins:
    """Stand-ins in a model that runs without values.

    Attributes:
        of: block -> the one whose bytes and shapes are its own.
    """

    def __init__(self, model: nn.Module, trace: Trace, micro_batch: Mapping[str, Any]) -> None:
        """Args:
        model: the copy that runs; its blocks' forwards are replaced.
        trace: says whether a block can be left out: not where anything but its result is read later, or blocks run
            several times.
        micro_batch: arguments of the forward; another form of call than the recorded one may read something else.
        """
        self.of: dict[int, int] = {}
        self._calls: dict[int, _Call] = {}
        if trace.leaks or trace.kept or trace.repeats or form_of(micro_batch) != trace.form:
            return
        kinds = kinds_of([model.get_submodule(name) for name in trace.blocks], [cost.flops for cost in trace.costs])
        first: dict[tuple[int, ...], int] = {}
        # What a block is given may be free when the one behind it has run, so two before it count.
        neighbours = zip([-1, -1, *kinds], [-1, *kinds], kinds, [*kinds[1:], -1], strict=False)
        for block, key in enumerate(neighbours):
            twin = first.setdefault(key, block)
            if twin == block:
                continue
            self.of[block] = twin
            if block - 1 in self.of:  # behind a twin's own model nothing is left out: it may keep what it hands on
                module = model.get_submodule(trace.blocks[block])
                module.forward = self._stand_in(block, twin, module.forward)
        for twin in set(self.of.values()):
            model.get_submodule(trace.blocks[twin]).register_forward_hook(self._note(twin), with_kwargs=True)

    def _note(self, twin: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if twin not in self._calls:  # else it is computed again
                self._calls[twin] = _Call.of((args, kwargs), result)

        return hook

    def _stand_in(self, block: int, twin: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = self._calls.get(twin)
            if block in self.of and call is not None and call.fits((args, kwargs)):
                return call.result_for((args, kwargs))
            self.of.pop(block, None)
            return forward(*args, **kwargs)

        return run


@dataclass(frozen=True, slots=True)
class _Call:
    """What a block was given and returned, without its tensors."""

    given: tuple[Any, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    """Of the result: an argument's number (_Given), what a new tensor is like (Like), or a constant."""

    @classmethod
    def of(cls, arguments: Any, result: Any) -> _Call:
        numbers = {id(leaf): k for k, leaf in enumerate(tree_flatten(arguments)[0]) if isinstance(leaf, Tensor)}
        leaves, spec = tree_flatten(result)
        made = [_Given(numbers[id(leaf)]) if id(leaf) in numbers else like(leaf) for leaf in leaves]
        return cls(_described(arguments), spec, tuple(made))

    def fits(self, arguments: Any) -> bool:
        """Whether the block would do with these the like of what it did; with no gradient to pass on it would not."""
        makes = any(isinstance(leaf, Like) and leaf.requires_grad for leaf in self.leaves)
        takes = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_flatten(arguments)[0])
        return _described(arguments) == self.given and (takes or not makes)

    def result_for(self, arguments: Any) -> Any:
        """Returns the like of what the block returned."""
        given = tree_flatten(arguments)[0]
        made = [leaf for leaf in self.leaves if isinstance(leaf, Like)]
        taken = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]
        new = iter(_StandIn.apply(made, *taken))  # type: ignore[no-untyped-call]
        leaves = [next(new) if isinstance(leaf, Like) else leaf for leaf in self.leaves]
        return tree_unflatten([given[x.number] if isinstance(x, _Given) else x for x in leaves], self.spec)


@dataclass(frozen=True, slots=True)
class _Given:
    number: int


def _described(arguments: Any) -> tuple[Any, ...]:
    """Returns what is equal for calls that do the like; whole numbers may be the block's."""
    leaves, spec = tree_flatten(arguments)
    plain = (bool, float, str, type(None))
    return str(spec), *(
        like(leaf) if isinstance(leaf, Tensor) else leaf if isinstance(leaf, plain) else type(leaf) for leaf in leaves
    )


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Sequence[Like], *taken: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*taken)  # as nearly every block does
        results = tuple(torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in made)
        ctx.mark_non_differentiable(*(x for x, one in zip(results, made, strict=True) if not one.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(torch.empty_like(tensor) for tensor in ctx.saved_tensors)
