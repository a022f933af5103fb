"""PipelineChunk: one (segment, stage) cell of the model, driven by the C++ Executor."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fold3d import _C
from fold3d.comms.consistency import samples_of_values
from fold3d.errors import SplitError
from fold3d.stage.loss_run import ModelCall
from fold3d.stage.micro_batch import MicroBatch, one_number
from fold3d.stage.replay import ChangedBuffers, OwnBuffers
from fold3d.stage.sharded_chunk import ShardedChunk
from fold3d.stage.split_model import SplitModel
from fold3d.stage.users_state import SharedValues, may_write_unseen
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.kept_exchanges import KeptRun
from fold3d.tensor_parallel.random_draws import BEGINS_TO_DRAW, Chances, PerSampleRandom, Together
from fold3d.tensor_parallel.vocabulary import gathered

logger = logging.getLogger(__name__)

Run = Literal["only", "first", "again"]
"""Of a chunk with a micro-batch: its graph stays; it will run once more, for the graph; it does so."""


class OncePerMicroBatch:
    """Around each chunk's run of a micro-batch, where the model is cut or a chunk runs twice.

    In a process with several chunks the model's code in front of its blocks runs for each, and all of a chunk that
    recomputes runs again. What is drawn from Python's and numpy's generators is drawn once (`DrawnNumbers`), what is
    changed of buffers and modules' attributes is changed once (`ChangedBuffers`); to change what the model is called
    with is an error. On every process micro-batches begin before the backwards of others: buffers are written to apart
    (`OwnBuffers`), and global variables must not count (`SharedValues`).
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], *, repeats: bool = True) -> None:
        """Args:
        repeats: whether any code of the model's runs several times in this process.
        """
        unseen = may_write_unseen(model)
        self._buffers = ChangedBuffers(model, blocks, unseen=unseen) if repeats else None
        self._own, self._shared = OwnBuffers(model, unseen=unseen), SharedValues(model, unseen=unseen)

    @contextlib.contextmanager
    def around(self, chunk: int, micro_batch: MicroBatch, run: Run = "only") -> Iterator[None]:
        """Around the model's forward as a chunk. Raises: SplitError when that changed what it was called with."""
        inputs, again = _versions(micro_batch.loss.call), run == "again"
        afterwards = micro_batch.afterwards if micro_batch.loss.is_users and not again else None
        own = self._own.around(chunk, afterwards)
        shared = self._shared.unchanged(micro_batch.key[:2] if micro_batch.trains else None)
        if self._buffers is None:
            with own, shared:
                yield
            return
        if again:
            buffers = self._buffers.again(micro_batch.before)
        else:
            before = micro_batch.before
            buffers = self._buffers.of_chunk(chunk, before, recomputes=run == "first", afterwards=afterwards)
        with micro_batch.drawn.once(chunk, again=again), buffers, own, shared:
            yield
        changed = [name for name, now in _versions(micro_batch.loss.call).items() if now != inputs[name]]
        if changed:
            raise SplitError(
                f"the model's forward changed its argument {changed[0]!r} in place. It runs several times in this "
                "process, once for each chunk of the model and again for each that recomputes, so that would be "
                'changed several times: change a copy, or set segments=1 and recompute="none"'
            )


def _versions(call: ModelCall | None) -> dict[str, int]:
    """Returns how often each tensor among the arguments was changed in place."""
    given = {} if call is None else call.named()
    return {
        name: value._version for name, value in given.items() if isinstance(value, Tensor) and not value.is_inference()
    }


class PartDraws:
    """Of a process's chunks. So masks of dropout do not depend on how a micro-batch is divided.

    Where a chunk drew nothing, its next runs are left alone, until chances of dropout have changed, or it draws.
    """

    def __init__(self, model: nn.Module) -> None:
        self._chances = Chances(model)
        self._together: dict[int, Together] = {}
        self._nothing: dict[int, tuple[Any, ...]] = {}  # chances with which a chunk drew nothing

    @contextlib.contextmanager
    def around(self, chunk: int, micro_batch: MicroBatch, run: Run, has_drawn: Callable[[], bool]) -> Iterator[None]:
        """Around a chunk's run of a part; without effect on a whole micro-batch.

        Args:
            has_drawn: whether anything was drawn since it was asked last.
        """
        if micro_batch.part is None:
            yield
            return
        chances = self._chances.now()
        alone = (self, chunk) in micro_batch.draws_alone if run == "again" else self._nothing.get(chunk) == chances
        if alone:
            micro_batch.draws_alone.add((self, chunk))
        has_drawn()
        mode = PerSampleRandom(*micro_batch.part, self._together.get(chunk))
        with contextlib.nullcontext() if alone else mode:
            yield
        first, end, samples = micro_batch.part
        if not alone and end - first == samples:  # as where it is compared with its parts
            self._together[chunk] = Together(mode.sizes, samples)
        if not has_drawn() and not mode.used:
            self._nothing[chunk] = chances
        elif alone and self._nothing.pop(chunk, None) is not None:
            logger.warning(BEGINS_TO_DRAW, "micro_batch_size")


class ChunkSync(Protocol):
    """What a chunk tells of its forwards and backwards."""

    def before_chunk(self, chunk: int) -> None:
        """Waits for the parameters that any module of the chunk may read."""

    def chunk_done(self, chunk: int) -> None:
        """The chunk's last backward is done."""


class PipelineChunk:
    """Runs one chunk of a SplitModel; the methods are called by the Executor on the thread that runs the step."""

    def __init__(
        self,
        index: int,
        is_last: bool,
        split: SplitModel | WholeModel,
        sync: ChunkSync,
        once: OncePerMicroBatch | None,
        sharding: ShardedChunk | None = None,
        draws: PartDraws | None = None,
        *,
        turn_to: Callable[[int, bool], None] | None = None,
        is_end: bool = True,
        compares: bool = False,
        own: Callable[[], Iterable[Parameter]] | None = None,
    ):
        """Args:
        is_last: whether it is the model's last, whose results leave the pipeline.
        is_end: whether it is the last one on this rank.
        compares: other ranks have the same micro-batches, and must call the model with the same values.
        own: the model's parameters; what else losses depend on is told once. None: there is one process.
        once: of a model that is cut, or of a process that recomputes; None: this is the only chunk, and runs once.
        sharding: what is different where several ranks share its weights; None: nobody does.
        draws: where micro-batches may be parts of the user's; None: they are not.
        turn_to: of steps without a flush; told before each action the number of its micro-batch, and whether it is of
            the step before. None: all have a flush.
        """
        self.turn_to = turn_to
        self.index = index
        self._is_last, self._is_end, self._compares = is_last, is_end, compares
        self._split = split
        self._sync = sync
        self._sharding = sharding
        self._once = once
        self._draws = draws
        self._own = own if is_last else None

    def forward(
        self, micro_batch: MicroBatch, received: list[torch.Tensor], batch: _C.StashBatch | None = None
    ) -> tuple[list[torch.Tensor], Any]:
        """Returns the tensors for the next chunk, and None; for the last chunk its loss (or nothing, when the result is
        no tensor), followed in training by what the model's last block returned, and the result without gradient.

        Args:
            batch: what saves the graph's tensors, which leave the device until the backward; None: they stay.
        """
        self._sync.before_chunk(self.index)
        return self._forward(micro_batch, received, "only", batch)

    def forward_first(
        self, micro_batch: MicroBatch, received: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Any, list[torch.Tensor]]:
        """Does what `forward` does, where `recompute` follows; also returns what that needs beside `received`.

        Nobody waits for what the last chunk returns before its backward, and its loss function runs once: it does
        nothing yet, and `recompute` gives the loss its value.
        """
        self._sync.before_chunk(self.index)
        if self._is_last:
            value = torch.zeros((), dtype=torch.float64, device=received[0].device)
            micro_batch.value.append(value)
            return [value], value, []
        run = micro_batch.kept[self.index] = KeptRun()
        with contextlib.nullcontext() if self._sharding is None else self._sharding.first(run):
            sent, result = self._forward(micro_batch, received, "first")
        return sent, result, run.take()

    def recompute(
        self, micro_batch: MicroBatch, received: list[torch.Tensor], kept: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns once more the tensors, or the loss, that `forward_first` returned, for the graph behind them."""
        if self._is_last:
            sent, result = self._forward(micro_batch, received, "only")
            micro_batch.value.pop().copy_(result)
            return sent[:1]
        run = micro_batch.kept.pop(self.index)
        run.give_back(kept)
        with contextlib.nullcontext() if self._sharding is None else self._sharding.again(run):
            return self._forward(micro_batch, received, "again")[0]

    def _forward(
        self, micro_batch: MicroBatch, received: list[torch.Tensor], run: Run, batch: _C.StashBatch | None = None
    ) -> tuple[list[torch.Tensor], Any]:
        if self._sharding is not None:
            received = self._sharding.receive(received)
        # A hook may have one require a gradient (transformers' `enable_input_require_grads`) that the chunk before,
        # which does not run the hook, would not expect.
        received = [one if one.requires_grad else one.detach() for one in received]
        around = contextlib.nullcontext() if self._once is None else self._once.around(self.index, micro_batch, run)
        draws: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._draws is not None:
            draws = self._draws.around(self.index, micro_batch, run, self._split.take_drawn)
        loss, result = micro_batch.loss, None
        try:
            with _saving(batch), draws:
                with self._watched(micro_batch):
                    self._split.begin(loss, micro_batch.key)
                if self._compares and loss.call is not None and not micro_batch.given:
                    micro_batch.given.update(samples_of_values(loss.call.named()))
                with around:
                    sent, output = self._run(micro_batch, received)
                if self._is_last:
                    with self._watched(micro_batch), micro_batch.afterwards.held():
                        result = self._split.end(loss, output)
                if self._sharding is not None:  # behind the loss: it may run copies of the model
                    self._sharding.ran(micro_batch, result)
        finally:
            ends = self._split.take_ends()
        if self._sharding is not None:
            sent = self._sharding.send(sent)
        if not self._is_last:
            if self._is_end and run != "again":
                loss.let_go()
            return sent, None
        if micro_batch.trains:
            one_number(result)
            if isinstance(result, Tensor):
                self._tell_of_others(result)
        else:  # for code that not every rank of a tensor-parallel group runs
            result = gathered(result)
        if not isinstance(result, torch.Tensor):
            return [], result
        return [result, *(ends if run == "only" else ())], result.detach()

    def _tell_of_others(self, loss: torch.Tensor) -> None:
        own, self._own = self._own, None
        if own is None:
            return
        known = set(map(id, own()))
        others = [one for one in leaves_of(loss) if isinstance(one, Parameter) and id(one) not in known]
        if others:
            logger.warning(
                "the loss depends on %s weights that are not the model's, the first of shape %s: each process has its "
                "own copy of them, and nobody sums their gradients. Where they are trained, make them a part of the "
                "model, whose forward uses them; else freeze them (requires_grad_(False))",
                len(others),
                list(others[0].shape),
            )

    def _watched(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._sharding is None else self._sharding.watched(micro_batch)

    def _run(self, micro_batch: MicroBatch, received: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        done = None if self._sharding is None else self._sharding.run(micro_batch, received)
        return done or self._split.forward(self.index, micro_batch.loss, received, micro_batch.key)

    def reduce(self) -> None:
        """The last backward of this chunk is done."""
        self._sync.chunk_done(self.index)


def leaves_of(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields what a value has been computed from and gradients are for."""
    seen: set[Any] = set()
    todo = [value.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        todo += [one for one, _ in node.next_functions]


def _saving(batch: _C.StashBatch | None) -> contextlib.AbstractContextManager[Any]:
    # Hooks inside of these go first: the user's own, and those of a checkpoint, whose inputs are saved outside of them.
    if batch is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(batch.save, _C.unpack_saved)
