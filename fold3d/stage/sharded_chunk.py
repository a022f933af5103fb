"""ShardedChunk: what one chunk does differently whose weights are spread over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.errors import ConfigError, SplitError
from fold3d.sharding.split import SequenceSplit
from fold3d.stage.loss_reads import ShardReads
from fold3d.stage.loss_run import LossRun
from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.sub_pipeline import SubPipeline
from fold3d.tensor_parallel.kept_exchanges import KeptExchanges, KeptRun
from fold3d.tensor_parallel.operators import BlockOperators
from fold3d.tensor_parallel.region import Exchange, RegionOps
from fold3d.tensor_parallel.slices import replace_leaf
from fold3d.trace import Trace
from fold3d.trace.arguments import Arguments, by_name
from fold3d.trace.module_results import Value


class BorderParts:
    """The scatter/gather optimization of Narayanan et al., "Efficient large-scale language model training on GPU
    clusters" (2021), section 4.1: between stages a rank sends 1 / tp of an activation, and the next stage's ranks
    gather it over the links that they have among themselves; gradients go back alike.

    Only what is the same in every micro-batch decides which tensors are sent in parts, since the receiver has no whole
    one to look at: floating point, with a last dimension that divides and is one that the model's weights have, so that
    it does not change with the lengths of samples. Hidden states of which each rank has a part already are left alone.
    """

    def __init__(
        self,
        trace: Trace,
        ranges: Sequence[tuple[int, int]],
        widths: set[int],
        ops: RegionOps,
        sequence: Mapping[str, SequenceSplit] | None = None,
    ) -> None:
        """Args:
        ranges: blocks [first, end) of every chunk, cut where `Trace.under` tensor parallelism may be.
        widths: sizes that the model's whole parameters have.
        sequence: blocks that work on parts of the sequence, by name; None: none does.
        """
        self._ops = ops
        self._parted = [
            [
                one.dtype.is_floating_point
                and bool(one.shape)
                and one.shape[-1] % ops.size == 0
                and one.shape[-1] in widths
                and parted not in one.values
                for one in trace.crossings[end]
            ]
            for _, end in ranges[:-1]
            for parted in (_parted_already(trace, end - 1, sequence or {}),)
        ]

    def send(self, chunk: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns what this rank sends of what leaves the chunk.

        Raises: SplitError in a form of call for which other tensors do than in the recorded one.
        """
        if len(tensors) != len(self._parted[chunk]):
            raise SplitError(
                f"{len(tensors)} tensors leave chunk {chunk}, {len(self._parted[chunk])} in the recorded call: "
                "with tp > 1 all calls of the model must need the same. Ask for the same outputs in all, or set tp=1"
            )
        return [
            self._ops.exchange(tensor, Exchange.scatter(-1, tensor.shape[-1])) if parted else tensor
            for tensor, parted in zip(tensors, self._parted[chunk], strict=True)
        ]

    def receive(self, chunk: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns what the chunk before this one returned; all ranks of the group call."""
        size = self._ops.size
        return [
            self._ops.exchange(x, Exchange.gather(-1, x.shape[-1] * size, sums=False)) if parted else x
            for x, parted in zip(tensors, self._parted[chunk - 1], strict=True)
        ]


def _parted_already(trace: Trace, block: int, sequence: Mapping[str, SequenceSplit]) -> Value | None:
    """Returns which of the tensors that a block returns is a part of the sequence."""
    split = sequence.get(trace.blocks[block])
    if split is None or split.ends:
        return None
    structure = trace.structures[block]
    numbers = structure.unflatten([torch.tensor(number) for number in range(structure.num_tensors)])
    found: list[int] = []

    def note(number: Tensor) -> Tensor:
        found.append(int(number))
        return number

    replace_leaf(numbers, split.result, note)
    return trace.result(block, found[0]) if found else None


_MOST_NAMES = 5
"""Of operators in an error: what follows a change comes from other tensors, too."""


ProveAgain = Callable[[Arguments, Mapping[str, Collection[int]]], Mapping[str, str]]
"""Arguments of the model, by the name of each block numbers of what it must run (`Operators`) -> why its division does
not hold; "" where it does."""


class OperatorChecks:
    """Of all chunks of a rank: has blocks proved again that have run other operators than when they were divided, or in
    another order. All ranks of a group run alike, so each does that by itself."""

    def __init__(self, model: nn.Module, operators: BlockOperators, prove: ProveAgain) -> None:
        self._model, self._operators, self._prove = model, operators, prove

    def check(self, loss: LossRun, *, trains: bool) -> None:
        """Looks at what has run with the micro-batch of `loss`. Raises: ConfigError."""
        new = list(self._operators.take_new())
        if not new:
            return
        by_itself = "the loss function calls it, or what holds it, by itself"
        reasons: Mapping[str, str] = dict.fromkeys((name for name, *_ in new), by_itself)
        if loss.call is not None:
            arguments = by_name(self._model, *loss.call).reading(loss.only_loss)
            # Before, devices and dtypes are what may differ; an evaluation may keep caches that no copy has.
            wanted = {name: () if is_first or not trains else found.keys() for name, found, is_first in new}
            reasons = self._reasons(arguments, wanted, [name for name, _, is_first in new if is_first])
        for name, found, _ in new:
            if reasons[name]:
                names = list(dict.fromkeys(found.values()))
                last = ", ".join([*names[:_MOST_NAMES], *["..."] * (len(names) > _MOST_NAMES)])
                raise ConfigError(
                    f"tp: {name} ({type(self._model.get_submodule(name)).__name__}) computes otherwise than with the "
                    "first micro-batch (or the Engine's `example`), by which it was divided over the tensor-parallel "
                    f"group: it runs {last} where it did not. The division does not hold for that ({reasons[name]}). "
                    f"Have the first micro-batch do it, too, leave it whole with tp_plan={{'{name}*': 'replicate'}}, "
                    "or set tp=1"
                )

    def _reasons(
        self, arguments: Arguments, wanted: Mapping[str, Collection[int]], first: Collection[str]
    ) -> Mapping[str, str]:
        """Returns of each block why its division does not hold; of those in `first` not that they cannot be run."""
        try:
            return self._prove(arguments, wanted)
        except Exception as error:  # whatever a model's code does in a copy
            if len(wanted) > 1:  # only some of them may do so
                return {name: self._reasons(arguments, {name: wanted[name]}, first)[name] for name in wanted}
            said = f"it cannot be run by itself: {type(error).__name__}: {error}"
            return {name: "" if name in first else said for name in wanted}


class ShardedChunk:
    """Of one chunk; all ranks of the group make the same calls."""

    def __init__(
        self,
        index: int,
        parts: BorderParts | None,
        sub: SubPipeline,
        kept: KeptExchanges,
        reads: ShardReads,
        in_halves: Callable[[], bool],
        operators: OperatorChecks,
    ) -> None:
        """Args:
        parts: None where nothing is sent between stages.
        kept: what its modules exchange.
        in_halves: whether micro-batches of the step under way run in halves.
        operators: looks at what blocks have run.
        """
        self._index, self._parts, self._sub, self._in_halves = index, parts, sub, in_halves
        self._kept, self._reads, self._operators = kept, reads, operators
        self._first: KeptRun | None = None
        self._repeated: KeptRun | None = None
        self._in_parts = False

    @contextmanager
    def first(self, run: KeptRun) -> Iterator[None]:
        """Around a run that is repeated later: what it gets from the other ranks is kept in `run`."""
        self._first = run
        try:
            with self._kept.first(run):
                yield
        finally:
            self._first = None

    @contextmanager
    def again(self, run: KeptRun) -> Iterator[None]:
        """Around the run that repeats it."""
        self._repeated = run
        try:
            with self._kept.again(run):
                yield
        finally:
            self._repeated = None

    def watched(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Around the loss function's code. Raises: ConfigError, in it, where that reads parts of weights."""
        return self._reads.watched()

    def ran(self, micro_batch: MicroBatch, result: Any) -> None:
        """The model's forward has run, or more of the loss function's code, which returned `result`.

        Raises: ConfigError when a block took a way for which its division does not hold; SplitError when the head has
            read what it was not given.
        """
        self._operators.check(micro_batch.loss, trains=micro_batch.trains)
        if self._in_parts:
            self._sub.explain(micro_batch.loss, result)

    def receive(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns what the chunk before returned, of what this rank received of it."""
        return self._parts.receive(self._index, tensors) if self._parts is not None and self._index else tensors

    def send(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns what this rank sends of what the chunk returned."""
        return self._parts.send(self._index, tensors) if self._parts is not None and tensors else tensors

    def run(self, micro_batch: MicroBatch, received: list[Tensor]) -> tuple[list[Tensor], Any] | None:
        """Returns what the chunk returns for the micro-batch in halves; None: it is to run whole."""
        self._in_parts = False
        if self._repeated is not None:  # as it ran before, whatever was found out about micro-batches since
            return self._sub.run(micro_batch, received, again=True) if self._repeated.in_parts else None
        done = self._sub.run(micro_batch, received) if micro_batch.trains and self._in_halves() else None
        if self._first is not None:
            self._first.ran(in_parts=done is not None)
        self._in_parts = done is not None
        return done
