"""SubPipeline: runs a chunk on a micro-batch in sub-micro-batches, one communicating while another computes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fold3d import seeding
from fold3d.device import library_rng_state, same_library_rng_state, set_library_rng_state
from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.once.buffer_values import BufferValues
from fold3d.stage.sharded.sub_micro_batches import SubMicroBatch, divide, sub_micro_batches, tolerance, weights
from fold3d.stage.split_model import SplitModel
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.partial_draws import RedrawError
from fold3d.tensor_parallel.sub_pipelined.per_sample_random import PerSampleRandom
from fold3d.tensor_parallel.sub_pipelined.turning_ops import TurningOps

logger = logging.getLogger(__name__)

Result = tuple[list[Tensor], Any]
"""The tensors for the next chunk, and what the last chunk's call returned."""


class SubPipeline:
    """Of one chunk. Its results are those of the whole micro-batch, to floating-point reordering.

    Whether that holds is found out, not assumed: the first micro-batch also runs whole, without a backward, and its
    loss and outputs are compared. So a loss that is a sum is told from one that is a mean over labels or over samples,
    and where nothing fits (statistics over the batch, losses that compare samples) the micro-batches of this chunk
    stay whole, which is said once. Masks of dropout are those of the whole micro-batch (`PerSampleRandom`).

    All ranks of a tensor-parallel group compute the same results, to the bit, so they decide alike.

    Two parts hide what regions end with. Where the sequence is shared, one exchange follows right behind another (what
    a region ends with is scattered, and, behind a norm, gathered again), and both are hidden by three parts, of which
    the second one begins a turn later: of any two that follow each other, one then computes a region and the other a
    norm.
    """

    def __init__(
        self,
        index: int,
        model: nn.Module,
        split: SplitModel | WholeModel,
        ops: TurningOps,
        *,
        shares_sequence: bool = False,
    ) -> None:
        """Args:
        shares_sequence: whether regions begin with an exchange, too.
        """
        self._most = 3 if shares_sequence else 2
        self._index, self._model, self._split, self._ops = index, model, split, ops
        self._kinds: list[str] | None = None  # of losses that this one can be; None: nothing was compared yet
        self._joined: list[bool] = []  # per tensor for the next chunk: one part after the other; else all have the same
        self._draws = True
        self._generators = seeding.generators_of(_device(model))
        self._dropouts = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
        self._compared_with: list[float] = []
        self.reason = ""
        """Why micro-batches stay whole; empty where they do not."""

    def run(self, micro_batch: MicroBatch, received: Sequence[Tensor], *, again: bool = False) -> Result | None:
        """Returns what the whole micro-batch would give, for one backward over it; None where it has to run whole.

        Args:
            again: it ran in parts before, and does so once more.
        """
        if again:
            parts = sub_micro_batches(micro_batch, self._most)
            assert parts is not None
            return self._join(self._run_parts(parts, received), weights(parts))
        if self._stays_whole() or not micro_batch.trains:
            return None
        parts = sub_micro_batches(micro_batch, self._most)
        if parts is None:
            return None
        by_kind = weights(parts)
        chances = [module.p for module in self._dropouts]
        known = self._kinds is not None and self._compared_with == chances
        if known and self._kinds and not all(kind in by_kind for kind in self._kinds):
            return None  # a part without labels
        compares = not known or len({by_kind[kind] for kind in self._kinds or ()}) > 1
        whole = self._run_whole(micro_batch, received) if compares else None
        if self._stays_whole():
            return None
        try:
            results = self._run_parts(parts, received)
        except RedrawError as error:
            self._keep_whole(str(error))
            return None
        if whole is not None:
            self._compared_with = chances
            if not self._compare(whole, results, by_kind):
                return None
        return self._join(results, by_kind)

    def _run_whole(self, micro_batch: MicroBatch, received: Sequence[Tensor]) -> Result:
        """Leaves no traces."""
        drawn, buffers = library_rng_state(), BufferValues(self._model)
        with torch.no_grad():
            whole = self._split.run(self._index, partial(micro_batch.run, self._model), list(received), micro_batch.key)
        if not same_library_rng_state(drawn, library_rng_state()):
            set_library_rng_state(drawn)
            self._keep_whole("its loss function or its forward draws from Python's or numpy's generator")
        if buffers.restore():
            self._keep_whole("its forward changes buffers")
        return whole

    def _run_parts(self, parts: Sequence[SubMicroBatch], received: Sequence[Tensor]) -> list[Result]:
        inputs = list(zip(*(divide(tensor, parts) for tensor in received), strict=True)) or [()] * len(parts)
        modes = [PerSampleRandom(part.first, part.end, part.samples) for part in parts]

        def one(number: int) -> Result:
            if number == 1 and len(parts) > 2:
                self._ops.turns.hand_over()
            part = parts[number].micro_batch
            with modes[number] if self._draws else contextlib.nullcontext():
                return self._split.run(self._index, partial(part.run, self._model), list(inputs[number]), part.key)

        self._ops.begin()
        functions = [partial(one, number) for number in range(len(parts))]
        results = self._ops.turns.run(functions, [self._split], self._generators)
        self._draws = any(mode.used for mode in modes)
        return results

    def _compare(self, whole: Result, results: Sequence[Result], by_kind: dict[str, tuple[float, ...]]) -> bool:
        """Learns how the parts' results make the whole one's; returns whether they do."""
        expected, loss = whole
        self._joined = []
        for number, tensor in enumerate(expected):
            pieces = [sent[number].detach() for sent, _ in results]
            joins = sum(piece.shape[0] for piece in pieces if piece.ndim) == (tensor.shape[0] if tensor.ndim else -1)
            found = torch.cat(pieces) if joins else pieces[0]
            if not _close(found, tensor) or not (joins or all(_close(piece, tensor) for piece in pieces)):
                self._keep_whole("what it computes of a sample depends on the other samples of the micro-batch")
                return False
            self._joined.append(joins)
        if isinstance(loss, Tensor) and all(isinstance(result, Tensor) for _, result in results):
            possible = [
                kind
                for kind, weight in by_kind.items()
                if (self._kinds is None or kind in self._kinds) and _close(_weighted(results, weight).detach(), loss)
            ]
            if not possible:
                self._keep_whole("its loss is no sum and no mean over labels or samples")
                return False
            self._kinds = possible
        elif loss is not None:
            self._keep_whole("its loss function returns no tensor")
            return False
        else:
            self._kinds = []
        return True

    def _join(self, results: Sequence[Result], by_kind: dict[str, tuple[float, ...]]) -> Result:
        sent = [
            torch.cat([tensors[number] for tensors, _ in results]) if joins else results[0][0][number]
            for number, joins in enumerate(self._joined)
        ]
        return sent, _weighted(results, by_kind[self._kinds[0]]) if self._kinds else None

    def _stays_whole(self) -> bool:
        return bool(self.reason)

    def _keep_whole(self, reason: str) -> None:
        self.reason = reason
        logger.warning(
            "tp_overlap: chunk %d runs its micro-batches whole, without hiding TP.sync: %s", self._index, reason
        )


def _weighted(results: Sequence[Result], weights: Sequence[float]) -> Tensor:
    total: Tensor = torch.stack([loss * weight for (_, loss), weight in zip(results, weights, strict=True)]).sum()
    return total


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    largest = expected.abs().max() if expected.numel() else torch.zeros(())
    return bool(((found - expected).abs() <= tolerance(expected.dtype) * largest).all() or torch.equal(found, expected))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
