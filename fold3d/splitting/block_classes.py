"""BlockClasses: which blocks of a model are alike, so that what holds for one holds for the others."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fold3d.splitting.dividing.attributes import close
from fold3d.splitting.overrides import Overrides
from fold3d.splitting.probing.capture import CapturedCall, paths_of
from fold3d.splitting.probing.probe import Probe


class BlockClasses:
    """Blocks are alike if they are made of the same modules, are called alike, and compute the same from the same
    weights and arguments, in evaluation and in training.

    The last is tried, without the weights: what a block's code reads besides them, such as its number in the model, may
    mean nothing, or be a number of heads.
    """

    def __init__(self, overrides: Overrides) -> None:
        self._overrides = overrides
        self._first: dict[Hashable, CapturedCall] = {}
        self._values: dict[Hashable, list[list[Tensor]]] = {}

    def of(self, name: str, call: CapturedCall) -> Hashable:
        """Returns what is equal for blocks that are alike. Raises: whatever the block raises."""
        made = self.made_of(name, call)
        first = self._first.setdefault(made, call)
        values = _computed(replace(first, block=call.block))
        known = self._values.setdefault(made, [])
        number = next((k for k, one in enumerate(known) if close(one, values)), len(known))
        if number == len(known):
            known.append(values)
        return made, number

    def made_of(self, name: str, call: CapturedCall) -> Hashable:
        """Returns of what modules a block is made, and how it is called."""
        modules = tuple(
            (path, type(module), tuple((key, p.shape) for key, p in module.named_parameters(recurse=False)))
            for path, module in call.block.named_modules()
        )
        leaves, spec = tree_flatten((call.args, call.kwargs))
        kinds = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        return modules, str(spec), kinds, call.read, tuple(self._overrides.of_block(name, call.block).items())


def differs_in_training(call: CapturedCall) -> bool:
    """Returns whether a block computes something else in training than in evaluation, but for what it draws, or changes
    buffers there. False where that cannot be said, because it draws in ways of its own."""
    probe = Probe(call)
    evaluated = _values(probe)
    before = [buffer.clone() for buffer in probe.block.buffers()]
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        trained = _values(probe, training=True)
        if not torch.equal(state, torch.get_rng_state()):
            return False
    return not close(evaluated, trained) or not close(before, list(probe.block.buffers()))


def _computed(call: CapturedCall) -> list[Tensor]:
    probe = Probe(call)
    evaluated = _values(probe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return evaluated + _values(probe, training=True, draws=True)


def _values(probe: Probe, training: bool = False, draws: bool = False) -> list[Tensor]:
    """Returns what goes into each matrix product, and the block's results."""
    seen = probe.run_in_training(draws) if training else probe.run()
    results = [leaf.detach() for _, leaf in paths_of(probe.output)]
    return [*(x for inputs in seen.values() for x in inputs), *results]
