"""SplitModel: runs one chunk of an unmodified model by the model's own forward.

The forward of the whole model is called on every chunk, so masks, positions and rotary tables are built by
the model's own code from the micro-batch. What differs are forwards on instances, see `SplitForwards`.

The loss function around it is a coroutine (see `LossRun`), which rests where it calls the model; hooks of the model
itself run there. Forward hooks of other modules run as always, with one shift: those of a chunk's last block run on the
next chunk, on what it received.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fold3d import seeding
from fold3d.device import device_of
from fold3d.errors import MissingWeightsError
from fold3d.stage.call_guard import CallGuard
from fold3d.stage.cargo import Borders
from fold3d.stage.chunk_run import ChunkExit, ChunkRun
from fold3d.stage.loss.foreign_tensors import ForeignTensors
from fold3d.stage.loss.loss_run import NOT_CALLED, USES_A_PART, LossRun, ModelCall
from fold3d.stage.loss.namespaces import ModelState
from fold3d.stage.split_forwards import SplitForwards
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.results.lazy_whole import behind_blocks
from fold3d.trace.arguments import ancestors
from fold3d.trace.errors import SplitError
from fold3d.trace.model_trace import Trace
from fold3d.weights.missing import at_home

_AS_RECORDED = (
    "as often as in the first batch, by which the model was cut: where other batches run them another number of times, "
    "set pp=1 and segments=1"
)


class SplitModel(SplitForwards):
    """Runs any chunk of `model`; one model object serves all chunks of a rank.

    Args:
        model: the model; parameters that this rank does not own may be on the meta device (see `release`).
        trace: its recording.
        ranges: [first, end) block of every chunk of the whole model, in chunk order.
        recompute: names of the blocks that backward computes again instead of keeping their activations (training mode
            only).
        beneath: what else runs the model, whole: what it has put on blocks stays.
        computes_loss: whether this process runs the last chunk.
    Raises: TraceError if the ranges do not cover the blocks or cut where the model cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        ranges: Sequence[tuple[int, int]],
        *,
        recompute: Collection[str] = (),
        beneath: WholeModel | None = None,
        computes_loss: bool = True,
    ) -> None:
        trace.check_ranges(list(ranges))
        super().__init__(model, trace, recompute, beneath)
        self._device = device_of(model)
        self._ranges = tuple(ranges)
        self._guard = CallGuard(model, trace, ranges)
        self._callable = ancestors(trace.blocks)
        self._state = ModelState(model)
        self._foreign = ForeignTensors(model, trace, computes_loss=computes_loss)
        self._last_run: ChunkRun | None = None
        self._is_busy = False
        self.install()

    def run(
        self,
        chunk: int,
        call: Callable[[], Any] | LossRun,
        inputs: list[Tensor],
        key: tuple[int, int, int] | None,
        *,
        only_loss: bool = False,
    ) -> tuple[list[Tensor], Any]:
        """Runs chunk `chunk` with what `call` calls the model with, and `call` itself as far as it has not run.

        Args:
            chunk: index into `ranges`.
            call: calls `model(**micro_batch)` once, perhaps inside a loss function. A LossRun goes on in each chunk.
            inputs: the tensors that the chunk before handed over, in its order; empty for chunk 0.
            key: (seed, step, global micro-batch): dropout masks depend on it and on the module, never on the
                layout. The global generators are left in another state. None: no reseeding (evaluation).
            only_loss: `call` reads nothing but the loss of what the model returns.
        Returns: the tensors that leave and None; for the last chunk an empty list and what `call` returned.
        Raises: SplitError if the forward ran otherwise than recorded, and whatever `call` raises.
        """
        loss = LossRun.of(call, only_loss=only_loss)
        self.begin(loss, key)
        sent, output = self.forward(chunk, loss, inputs, key)
        return sent, self.end(loss, output) if self.is_last(chunk) else None

    def begin(self, loss: LossRun, key: tuple[int, int, int] | None) -> None:
        """Runs a loss function up to its call of the model, unless it has.

        Raises: SplitError when it does not call the model, or uses a part of it by itself; what it raises.
        """
        with self._busy():
            if not loss.has_begun:
                with self._around():
                    loss.begin(self._model, self._callable, self._device, key, self._state)
                if loss.uses_weights:  # one that has begun before the model was cut does not
                    raise SplitError(USES_A_PART.format("what it calls the model with has a gradient"))
            if loss.call is None:
                raise SplitError(NOT_CALLED)

    def forward(
        self, chunk: int, loss: LossRun, inputs: list[Tensor], key: tuple[int, int, int] | None
    ) -> tuple[list[Tensor], Any]:
        """Runs the model's forward as chunk `chunk`, with the arguments of the call at which the loss function rests.

        Returns: the tensors that leave and None; for the last chunk an empty list and what the model returned.
        """
        return self._forward(self._ranges[chunk], self.is_last(chunk), loss, inputs, key)

    def is_last(self, chunk: int) -> bool:
        """Returns whether a chunk has the head, what lies behind the last block."""
        return chunk == len(self._ranges) - 1

    def why_not_in_parts(self, chunk: int, loss: LossRun) -> str:
        """Returns why the blocks cannot run on parts of the micro-batch; "" where they may."""
        assert loss.call is not None
        if hooked := self._foreign.hooked():
            return f"hooks of {hooked} would see parts of a micro-batch"
        if loss.is_users and self._trace.kept:
            return f"the loss function may read the attribute {self._trace.kept[0]}, which would be of a part"
        if not self.is_last(chunk):
            return ""
        return self._guard.enter(loss.call, only_loss=loss.only_loss)[0].head_border

    def body(
        self,
        chunk: int,
        loss: LossRun,
        inputs: list[Tensor],
        key: tuple[int, int, int] | None,
        call: ModelCall | None = None,
    ) -> list[Tensor]:
        """Runs the model's forward as chunk `chunk`, up to the last of its blocks.

        Args:
            call: instead of the loss function's, such as one of some samples.
        Returns: the tensors that leave; what the head takes, for the last chunk.
        """
        return self._forward(self._ranges[chunk], False, loss, inputs, key, call)[0]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What is beneath does nothing meanwhile."""
        if self._beneath is None:
            yield
            return
        state = self._beneath.put_aside()
        try:
            yield
        finally:
            self._beneath.take_up(state)

    def head(self, loss: LossRun, inputs: list[Tensor], key: tuple[int, int, int] | None) -> tuple[list[Tensor], Any]:
        """Runs what lies behind the last block; returns as `forward` does for the last chunk."""
        last = len(self._trace.blocks)
        with behind_blocks():
            found = self._forward((last, last), True, loss, inputs, key)
        self._ends = list(inputs) if torch.is_grad_enabled() else []
        return found

    def _forward(
        self,
        blocks: tuple[int, int],
        last: bool,
        loss: LossRun,
        inputs: list[Tensor],
        key: tuple[int, int, int] | None,
        instead: ModelCall | None = None,
    ) -> tuple[list[Tensor], Any]:
        assert loss.call is not None
        device, output = inputs[0].device if inputs else self._device, None
        with self._busy(), at_home(device):
            found, call = self._guard.enter(instead or loss.call, only_loss=loss.only_loss)
        with self._busy(), at_home(device), loss.inside((blocks, last)):
            run = self._begin(blocks, last, device, inputs, key, self._borders_in(found))
            try:
                self._foreign.begin(run, is_users=loss.is_users)
                self._run = run
                self._slot.begin(run, run.alike)
                output = self._model.get_submodule(call.module).forward(*call.args, **call.kwargs)
            except ChunkExit as leave:
                if leave.owner is not self:
                    raise
            except (RuntimeError, NotImplementedError) as error:
                if not _is_of_missing(error):
                    raise
                raise SplitError(
                    f"the chunk of blocks {run.lo} to {run.hi - 1} read a parameter that belongs to another "
                    f"chunk: {error}. The recording did not see that read: pass an `example` with all keys of "
                    f"a training batch. The forward must run the blocks {_AS_RECORDED}"
                ) from error
            finally:
                self._slot.end()  # first: blocks that are skipped without a run would be so silently
                self._run = None
                self._foreign.end()
        self._last_run = run if last else None
        if last and run.position != run.hi:
            raise SplitError(
                f"the model ran {run.position} of its {run.hi} blocks; the call must run the model's whole forward "
                f"once, and its blocks {_AS_RECORDED}"
            )
        if not last and run.leaving is None:
            raise SplitError(
                f"the call ended before block '{self._trace.blocks[run.hi - 1]}', the last of a chunk, was done: it "
                f"must run the model's whole forward once, and its blocks {_AS_RECORDED}"
            )
        return run.leaving or [], output

    def end(self, loss: LossRun, output: Any) -> Any:
        """The loss function goes on with what the model returned; returns what it returns."""
        run, self._last_run = self._last_run, None
        given = () if loss.call is None else loss.call.named().values()
        guarded = self._foreign.guarded(run, given, is_users=loss.is_users)
        with self._busy(), self._around(), guarded:
            return loss.end(output, apart=True)

    def remove(self) -> None:
        """Takes forwards and hooks off the model again. The next `run` puts them back."""
        self._foreign.remove()
        super().remove()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        if self._is_busy:
            raise SplitError("a chunk is already running on this model: `run` must not be called from within `call`")
        if not self._undo:  # another SplitModel took its turn
            self.install()
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """Around code of the loss function's."""
        try:
            with at_home(self._device, lambda: False):
                yield
        except (RuntimeError, NotImplementedError) as error:
            if not _is_of_missing(error):
                raise
            raise SplitError(USES_A_PART.format(error)) from error

    def put_aside(self) -> tuple[ChunkRun | None, bool]:
        """Returns the run under way, for another one to begin."""
        state = self._run, self._is_busy
        self._run, self._is_busy = None, False
        self._slot.end()
        return state

    def take_up(self, state: tuple[ChunkRun | None, bool]) -> None:
        """Goes on with the run that `put_aside` returned."""
        self._run, self._is_busy = state
        if self._run is None:
            self._slot.end()
        else:
            self._slot.begin(self._run, self._run.alike)

    # -- one run --

    def _begin(
        self,
        blocks: tuple[int, int],
        last: bool,
        device: torch.device,
        inputs: list[Tensor],
        key: tuple[int, int, int] | None,
        borders: Borders,
    ) -> ChunkRun:
        seed = None if key is None else seeding.start(key)
        run = ChunkRun(blocks, last, device, seed, self._constants, inputs, borders)
        if key is not None:
            self._generators = run.generators
        return run


def _is_of_missing(error: Exception) -> bool:
    """Returns whether a weight was read that another process has."""
    return (isinstance(error, MissingWeightsError) or "meta" in str(error)) and not isinstance(error, SplitError)
