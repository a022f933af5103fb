"""Runs: a block run whole and as emulated ranks, with equal seeds, without a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fold3d.sharding.sequence import SequenceSplit
from fold3d.sharding.split import BlockSplit
from fold3d.splitting.probing.capture import CapturedCall
from fold3d.splitting.probing.double import DoubleMode
from fold3d.splitting.proving.emulate import EmulatedGroup, EmulatedOps
from fold3d.splitting.proving.factors import Factors
from fold3d.splitting.proving.proof import double_inputs, install_as_rank, shard_block, with_weights
from fold3d.tensor_parallel.partial_draws import PartialDraws

_SEED = 5

Watch = Callable[[nn.Module], AbstractContextManager[Any]]
"""Entered with a block while it runs."""


class Runs:
    """In double precision, with random weights; large ones are of low rank, as in a proof (`Factors`)."""

    def __init__(self, call: CapturedCall, split: BlockSplit, tp: int, *, training: bool) -> None:
        self._call, self._split, self._tp, self._training = call, split, tp, training
        self._factors, self._large = Factors(), Factors.candidates(call.block, split.shards)
        self.block = with_weights(call.block, self._large).train(training)

    def whole(self, mode: PartialDraws | None = None, watch: Watch = nullcontext) -> Any:
        """Returns what the whole block returns, run in this mode; `watch` may be entered again with another block."""
        large = [(name, self.block.get_parameter(name)) for name in self._large]
        args, kwargs = double_inputs(self._call)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), DoubleMode(), self._factors.mode(-1, large, {}):
            torch.manual_seed(_SEED)
            with mode or nullcontext(), watch(self.block):
                output = self.block(*args, **kwargs)
        unused = set(self._large) - self._factors.used
        if not unused:
            return output
        self._factors, self._large = Factors(), [name for name in self._large if name not in unused]
        self.block = with_weights(self._call.block, self._large).train(self._training)
        return self.whole(mode, watch)

    def ranks(
        self,
        split: BlockSplit,
        modes: Sequence[PartialDraws] = (),
        watches: Sequence[Watch] = (),
        sequence: SequenceSplit | None = None,
    ) -> list[Any]:
        """Returns what each rank's share of the block returns, run in a mode of its own if there are any."""
        blocks = [shard_block(self.block, split, rank, self._large) for rank in range(self._tp)]

        def as_rank(ops: EmulatedOps) -> Any:
            mine, rank = blocks[ops.rank], ops.rank
            install_as_rank(mine, split, ops, sequence)
            args, kwargs = double_inputs(self._call)
            with modes[rank] if modes else nullcontext(), watches[rank](mine) if watches else nullcontext():
                return mine(*args, **kwargs)

        owned = [(rank, name, block.get_parameter(name)) for rank, block in enumerate(blocks) for name in self._large]
        products = self._factors.modes(owned, split.shards)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), DoubleMode(), products:
            torch.manual_seed(_SEED)
            return EmulatedGroup(self._tp).run(as_rank)
