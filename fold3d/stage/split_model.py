"""SplitModel: runs one chunk of an unmodified model by the model's own forward.

blocks before the chunk, and modules with
parameters that run before it   -> return what the chunk received of their results, and NaN in the right shapes
                                   for what nothing reads any more
the chunk's last block          -> what crosses the border behind it leaves, and an exception ends the forward

The forward of the whole model is called on every chunk, so masks, positions and rotary tables are built by
the model's own code from the micro-batch. What differs are forwards on instances, which without a run under
way do what the modules' own do.

The loss function around it is a coroutine (see `LossRun`), which rests where it calls the model; hooks of the model
itself run there. Forward hooks of other modules run as always, with one shift: those of a chunk's last block run on the
next chunk, on what it received.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fold3d import seeding
from fold3d._C import CurrentForward, next_seed, reseed, seed_inside
from fold3d.device import device_of, seed_libraries, set_library_rng_state
from fold3d.errors import MissingWeightsError, SplitError, TraceError
from fold3d.stage.boundary import Borders, ChunkExit, ChunkRun, hooked_modules
from fold3d.stage.call_guard import CallGuard
from fold3d.stage.loss_reads import ForeignTensors
from fold3d.stage.loss_run import NOT_CALLED, USES_A_PART, LossRun, ModelCall, refuse_part
from fold3d.stage.recompute import recomputed
from fold3d.stage.users_state import DrawnBehind, ModelState
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.checkpoints import CheckpointMemory, function_around
from fold3d.tensor_parallel.whole_results import behind_blocks, plain_parts
from fold3d.torch_private import in_backward, saving_hook
from fold3d.trace.arguments import ancestors
from fold3d.trace.coat import Coat, Wrap, row_beneath
from fold3d.trace.model_trace import Trace
from fold3d.trace.shape_only import ShapeOnly
from fold3d.trace.state import SHARED_STATE, StateBetween
from fold3d.weights.release import at_home

_AS_RECORDED = (
    "as often as in the first batch, by which the model was cut: where other batches run them another number of times, "
    "set pp=1 and segments=1"
)


class SplitModel:
    """Runs any chunk of `model`; one model object serves all chunks of a rank.

    Args:
        model: the model; parameters that this rank does not own may be on the meta device (see `release`).
        trace: its recording.
        ranges: [first, end) block of every chunk of the whole model, in chunk order.
        recompute: names of the blocks that backward computes again instead of keeping their activations (training mode
            only).
        beneath: what else runs the model, whole.
        computes_loss: whether this process runs the last chunk.
        is_alone: whether it runs all of them.
        coat: what is put on the model goes with it.
        not_of_end: of parameters and buffers those that another stage saves than the one that runs the last block.
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
        is_alone: bool = True,
        coat: Coat | None = None,
        not_of_end: Collection[str] = (),
    ) -> None:
        trace.check_ranges(list(ranges))
        self._model, self._trace = model, trace
        self._recompute, self._beneath = frozenset(recompute), beneath
        self._drawn_behind = DrawnBehind(alone=is_alone)
        self._run: ChunkRun | None = None
        self._slot = CurrentForward()  # the same run, for forwards in C++
        self._constants = [seeding.constant_of(f"{name}:leave") for name in trace.blocks]
        self._generators = [torch.default_generator]
        # What a module that did not run itself returned inside a checkpoint of the user's own code, by its name: it
        # must return the same when backward runs that code again.
        self._replaced = CheckpointMemory()
        self._ends: list[Tensor] = []
        self._coat = Coat() if coat is None else coat
        self._outer = list(dict.fromkeys((*trace.prologue, *trace.between, *trace.epilogue, *trace.skipped)))
        self._hooked: list[str] = []
        self._notes_draws = self._has_drawn = False
        self._borders: dict[int, tuple[Trace, Borders]] = {}
        self._device = device_of(model)
        self._ranges = tuple(ranges)
        self._guard = CallGuard(model, trace, ranges, not_of_end)
        self._callable = ancestors(trace.blocks)
        self._state = ModelState(model)
        self._foreign = ForeignTensors(self._coat, model, trace, computes_loss=computes_loss)
        self._between = StateBetween(model, trace.blocks)
        self._last_run: ChunkRun | None = None
        self._is_busy = False
        self._install_all()

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

    def way(self, loss: LossRun) -> int:
        """Returns a number that calls have in common for which the model takes one way, as far as it was recorded."""
        return id(self._enter(loss)[0])

    def why_not_in_parts(self, chunk: int, loss: LossRun) -> str:
        """Returns why the blocks cannot run on parts of the micro-batch; "" where they may."""
        if hooked := self._foreign.hooked():
            return f"hooks of {hooked} would see parts of a micro-batch"
        if loss.is_users and self._trace.kept:
            return f"the loss function may read the attribute {self._trace.kept[0]}, which would be of a part"
        if not self.is_last(chunk):
            return ""
        return self._enter(loss)[0].head_border

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
        device, output = inputs[0].device if inputs else self._device, None
        with self._busy(), at_home(device):
            found, call = self._enter(loss, instead)
            with loss.inside((blocks, last)), self._guard.watched():
                run = self._begin(blocks, last, device, inputs, key, self._borders_in(found))
                try:
                    self._foreign.begin(run, is_users=loss.is_users)
                    self._run = run
                    self._slot.begin(run, run.earlier)
                    with self._foreign.watched(run), self._foreign.carried(found, run.hi):
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
                    self._has_drawn = self._has_drawn or run.has_drawn
                    if run.drawn_in_front is not None:  # what chunks draw behind that, not all of them do
                        set_library_rng_state(run.drawn_in_front)
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
            result = loss.end(output, apart=self._drawn_behind)
        self.explain(loss, result, head=False)
        return result

    def explain(self, loss: LossRun, result: Any, *, head: bool) -> None:
        """Raises SplitError where a loss is NaN because the model has read what its chunks leave out.

        Args:
            result: of the loss function.
            head: whether what lies behind the last block has run apart from the blocks.
        """
        if any(map(_is_no_number, tree_leaves(result))):
            self._guard.explain(loss.call, only_loss=loss.only_loss, head=head)

    def remove(self) -> None:
        """Takes forwards and hooks off the model again."""
        self._coat.close()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        if self._is_busy:
            raise SplitError("a chunk is already running on this model: `run` must not be called from within `call`")
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
            self._slot.begin(self._run, self._run.earlier)

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
        fill = self._foreign.fill(*self._trace.blocks[: blocks[0]])
        run = ChunkRun(blocks, last, device, seed, self._constants, inputs, borders, fill)
        self._between.begin()
        if key is not None:
            self._generators = run.generators
        return run

    def _enter(self, loss: LossRun, instead: ModelCall | None = None) -> tuple[Trace, ModelCall]:
        """Returns the recording of the form of a loss function's call, or of the one `instead` of it, and how it goes
        on."""
        assert loss.call is not None
        looked = loss.looked if instead is None else None
        with loss.attributes():
            return self._guard.enter(instead or loss.call, only_loss=loss.only_loss, looked=looked)

    def take_drawn(self) -> bool:
        """Returns whether torch's generators were drawn from in the runs since the last call."""
        drawn, self._has_drawn = self._has_drawn, False
        return drawn

    def take_ends(self) -> list[Tensor]:
        """Returns what the model's last block returned in the runs with gradient since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def _install_all(self) -> None:
        """Puts the instance forwards on the model."""
        runs: dict[str, list[int]] = {}
        for index, name in enumerate(self._trace.blocks):
            runs.setdefault(name, []).append(index)
        for name, indices in runs.items():
            self._install_block(name, indices)
        for name in self._outer:
            self._install_outer(name)

    def _note_drawn(self, *_: Any) -> None:
        if self._run is not None and self._run.borders.draws:
            self._run.note_drawn()

    def _borders_in(self, found: Trace) -> Borders:
        """Returns what crosses borders where the model is called in a form of which `found` is the recording."""
        if id(found) not in self._borders:
            self._borders[id(found)] = found, Borders(found)
            self._use_outer([name for region in found.around for name in region])
            for name in hooked_modules(found):
                if name not in self._hooked:
                    self._note_results_of(name)
                    self._hooked.append(name)
            if found.draws and not self._notes_draws:
                self._notes_draws = True
                self._coat.put(Wrap.FIRST, self._model.get_submodule(self._trace.blocks[0]), self._note_drawn)
        return self._borders[id(found)][1]

    def _running(self, name: str) -> ChunkRun | None:
        """Returns the run in which module `name` is called; None outside of one."""
        run = self._run
        if run is not None and run.leaving is not None:
            self._leave_late(run, name)
        return run

    def _leave(self, run: ChunkRun, index: int, output: Any) -> Any:
        """The chunk's last block is done: ends the forward, at once or as soon as no checkpoint is in the
        way."""
        if run.leave(run.cargo.leave()):
            raise ChunkExit(self)
        # The user's code called torch.utils.checkpoint around this block. An exception through it would leave
        # the checkpoint half-built, so the exit waits for the next module that starts.
        return output

    def _leave_late(self, run: ChunkRun, name: str) -> None:
        if run.checkpoint is not None and saving_hook() is run.checkpoint:
            raise SplitError(
                "one torch.utils.checkpoint call of the model covers both block "
                f"'{self._trace.blocks[run.hi - 1]}' and '{name}', so the model cannot be cut between "
                "them. Checkpoint each block on its own, or switch that off and set recompute=True."
            )
        raise ChunkExit(self)

    # -- instance forwards --

    def _watching_state(self, name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a block's forward that raises SplitError when it goes on counting what a block before has counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._between.enter()
            result = execute(*args, **kwargs)
            for what, before in self._between.leave(name):
                raise SplitError(f"{SHARED_STATE.format(before, name, what)}, or set pp=1 and segments=1")
            return result

        return run if self._between else execute

    def _install_block(self, name: str, indices: Sequence[int]) -> None:
        module, original = self._whole(name)
        enter = seeding.constant_of(f"{name}:enter")
        leave = self._constants[indices[0]]
        places, calls = frozenset(indices), self._trace.calls
        above = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
        ends = {one: self._model.get_submodule(one) for one in (name, *above)}  # whose calls end with the chunk

        execute = self._watching_state(name, recomputed(module, original) if name in self._recompute else original)
        # Of the blocks that are left out, C++ skips those for which the last one can stand, unless anything is
        # unusual.
        shape_only = ShapeOnly(name, module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._running(name)
            if run is None:
                return self._outside(name, original, enter, leave, args, kwargs)
            index = run.position
            if index not in places:
                self._out_of_order(run, name)
            run.enter(index)
            call = calls[index]
            if run.with_grad and not torch.is_grad_enabled():
                self._refuse_functions(name)
            if index + 1 == run.hi and run.with_grad and not run.last:
                _refuse_backward_hooks(ends)
            run.begin_module(enter)
            try:
                borders, cargo = run.borders, run.cargo
                structure = borders.structure(index)
                if index >= run.lo:
                    run.begin_block(borders.begin(index))
                    if borders.draws and run.generators:
                        seed_libraries(torch.default_generator.initial_seed())
                    output = execute(*args, **kwargs)
                    cargo.note(name, call, output, structure)
                else:
                    # C++ skips no block while hooks keep what is saved, as where activations leave.
                    alike = run.alike if index + 1 == run.lo else run.earlier
                    output = alike if index >= run.alike_from else cargo.whole(name, call, structure)
                    if output is None:  # of a part, as the block has it; code between blocks has the whole
                        args, kwargs = plain_parts((args, kwargs))
                        stand_in = shape_only(run.device, args, kwargs, run.with_grad, self._foreign.fill(name))
                        output = cargo.put_into(name, call, stand_in)
                    output = self._replace(run, name, output)
                    borders.show(run.lo, index, self._model, cargo, (args, kwargs))
            except BaseException:
                run.leave_module()
                raise
            run.end_module(leave)
            if index + 1 == run.hi:
                if not run.last:
                    return self._leave(run, index, output)
                if run.with_grad:
                    self._ends += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            return output

        # C++ knows one place of a block in the order; of one that runs several times Python knows them.
        place = indices[0] if len(indices) == 1 else -1
        self._coat.put(Wrap.CHUNK, module, forward, self._slot, place, leave)

    def _install_outer(self, name: str) -> None:
        module, original = self._whole(name)
        enter = seeding.constant_of(f"{name}:enter")
        leave = seeding.constant_of(f"{name}:leave")
        skipped = self._trace.skipped
        has_parameters = next(module.parameters(), None) is not None
        shape_only = ShapeOnly(name, module) if has_parameters else None

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._running(name)
            if run is None:
                return self._outside(name, original, enter, leave, args, kwargs)
            if name in skipped and not run.borders.runs(name):
                self._out_of_order(run, name)
            begins = run.begin_module(enter)
            call = run.call_of(name) if begins and shape_only is not None else -1
            try:
                if run.position < run.lo and shape_only is not None:
                    stand_in = shape_only(run.device, args, kwargs, fill=self._foreign.fill(name))
                    output = run.cargo.put_into(name, call, stand_in)
                    output = self._replace(run, name, output)
                else:
                    output = original(*args, **kwargs)
                    run.cargo.note(name, call, output)
            except BaseException:
                if begins:
                    run.leave_module()
                raise
            if begins:
                run.end_module(leave)
            return output

        self._coat.put(Wrap.CHUNK, module, forward)

    def _note_results_of(self, name: str) -> None:
        """Of a module inside of blocks, whose results hooks hand on."""
        module = self._model.get_submodule(name)
        original = module.forward  # perhaps one that computes again

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            run = self._run
            if run is not None and run.block is not None:
                call = run.block.call_of(name)
                if call is not None:
                    run.cargo.note(name, call, output)
            return output

        self._coat.put(Wrap.NOTED, module, forward)

    def _outside(
        self,
        name: str,
        original: Callable[..., Any],
        enter: int,
        leave: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Called with no chunk running: by the user, or by backward through a checkpoint of the user's own
        code."""
        if not in_backward():
            refuse_part(f"its module '{name}'")
            return original(*args, **kwargs)
        seed = seeding.carried()
        if seed is not None:
            reseed(self._generators, seed_inside(seed, enter))
        here = self._replaced.run()
        replaced = {} if here is None else here.values
        try:
            output = replaced[name] if name in replaced else original(*args, **kwargs)
        except BaseException:
            if seed is not None:
                reseed(self._generators, seed)
            raise
        if seed is not None:
            reseed(self._generators, next_seed(seed, leave))
        return output

    def _replace(self, run: ChunkRun, name: str, output: Any) -> Any:
        """Returns `output`, which stands for what module `name` would return; remembers it for
        checkpoints."""
        if run.with_grad and saving_hook() is not run.outer_checkpoint:
            here = self._replaced.run()
            if here is not None:
                here.values[name] = output
        return output

    def _use_outer(self, names: Sequence[str]) -> None:
        """Modules around the blocks that only another form of call runs."""
        for name in names:
            if name not in self._outer:
                self._install_outer(name)
                self._outer.append(name)

    def _whole(self, name: str) -> tuple[nn.Module, Callable[..., Any]]:
        """Returns a module and its forward of now."""
        module = self._model.get_submodule(name)
        if row_beneath(module) in (Wrap.RECOMPUTED, Wrap.CHUNK):
            raise TraceError(
                f"module '{name}' is already split, and its forward was replaced since; take off what replaced it "
                "before another engine uses the model"
            )
        return module, module.forward

    # -- refusals --

    def _out_of_order(self, run: ChunkRun, name: str) -> None:
        expected = self._trace.blocks[run.position] if run.position < len(self._trace.blocks) else "the end"
        raise SplitError(
            f"block '{name}' ran where {expected} was due. The blocks must run as often and in the order "
            "in which they were recorded, in every forward, and the call must run the model once (no layerdrop, no "
            "second pass)."
        )

    def _refuse_functions(self, name: str) -> None:
        if function := function_around():
            raise SplitError(f"block '{name}' runs inside {function}")


def _refuse_backward_hooks(ends: Mapping[str, nn.Module]) -> None:
    """Of a block that ends a chunk, and what holds it: their calls end with an exception, behind which torch would put
    them."""
    for name, module in ends.items():
        if module._backward_hooks:
            raise SplitError(
                f"'{name}' has a backward hook, which would not be called: the model is cut in it, or behind it, and "
                "what reads its result is in another chunk. Put the hook on a module inside of a block, or on a "
                "block's result (a forward hook that calls output.register_hook), or set pp=1 and segments=1"
            )


def _is_no_number(leaf: Any) -> bool:
    """Whether it is one number, a loss, and NaN; not looked for on a device, for which the host would wait."""
    return type(leaf) is Tensor and leaf.numel() == 1 and leaf.device.type == "cpu" and bool(leaf.isnan())


def _is_of_missing(error: Exception) -> bool:
    """Returns whether a weight was read that another process has."""
    return (isinstance(error, MissingWeightsError) or "meta" in str(error)) and not isinstance(error, SplitError)
