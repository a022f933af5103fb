"""SplitModel: runs one chunk of an unmodified model by the model's own forward.

The forward of the whole model is called on every chunk, so masks, positions and rotary tables are built by
the model's own code from the micro-batch. Only three things differ, by instance-level forwards on the blocks
and the modules around them:

    blocks before the chunk, and modules with
    parameters that run before it   -> return what the chunk received of their results, and zeros of the right shapes
                                       for what nothing reads any more
    the chunk's last block          -> what crosses the border behind it leaves, and an exception ends the forward

On the model itself, and on what lies between it and the blocks, are hooks only (see `CallGuard`), so wrappers around
`model.forward` (autocast, for one) keep working. Forward hooks of the modules run as always, with one shift: those of a
chunk's last block run on the next chunk, on what it received.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from inspect import unwrap
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fold3d import seeding
from fold3d._C import BlockForward, CurrentForward, ForwardCursor, block_forward, next_seed, reseed, seed_inside
from fold3d.errors import MissingWeightsError, TraceError
from fold3d.stage.blocks.hooked_modules import BlockRun, hooked_modules
from fold3d.stage.call_guard import CallGuard, CallState
from fold3d.stage.cargo import Borders, Cargo
from fold3d.stage.recompute import recomputed
from fold3d.stage.shapes import ShapeOnly
from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint, function_around, group_of_checkpoint
from fold3d.tensor_parallel.results.lazy_whole import plain_parts
from fold3d.trace.errors import SplitError
from fold3d.trace.model_trace import Trace
from fold3d.trace.wrappers import wrap
from fold3d.weights.missing import at_home


class ChunkExit(BaseException):
    """Ends the model's forward after the chunk's last block. No Exception, so that no `except Exception`
    swallows it."""

    def __init__(self, owner: SplitModel) -> None:
        super().__init__("the chunk is done")
        self.owner = owner


class _Run(ForwardCursor):
    """One call of `SplitModel.run`."""

    def __init__(
        self,
        chunk: int,
        blocks: tuple[int, int],
        last: bool,
        device: torch.device,
        seed: int | None,
        constants: Sequence[int],
        received: Sequence[Tensor],
    ) -> None:
        lo, hi = blocks
        self.generators = [] if seed is None else seeding.generators_of(device)
        super().__init__(lo, seed, self.generators, constants)
        self.skip_from(lo)  # until it is known what crosses the borders
        self.chunk = chunk
        self.lo = lo
        self.hi = hi
        self.last = last
        self.device = device
        self.received = received
        self.borders: Borders | None = None
        self.cargo: Cargo | None = None
        self.alike_from = lo
        self.alike: Any = None
        self.leaving: list[Tensor] | None = None
        self.block: BlockRun | None = None
        self._calls: dict[str, int] = {}
        self.outer_checkpoint = group_of_checkpoint()
        self.checkpoint: object = None

    def load(self, borders: Borders) -> None:
        """The model is called, in a form for which `borders` say what crosses them."""
        self.borders, self.cargo = borders, borders.cargo(self.chunk, self.received)
        self.alike_from, self.alike = borders.alike(self.chunk, self.cargo)
        self.skip_from(self.alike_from)
        self._calls = {}

    def call_of(self, module: str) -> int:
        """Returns how often the module was called before by the model's forward, and counts this call."""
        call = self._calls[module] = self._calls.get(module, -1) + 1
        return call

    def begin_block(self, block: BlockRun) -> None:
        """A block of the chunk begins."""
        self.block = block

    def leave(self, leaving: list[Tensor]) -> bool:
        """The chunk's last block is done; returns whether the forward may be ended right here."""
        self.leaving = leaving
        self.checkpoint = group_of_checkpoint()
        return self.checkpoint is self.outer_checkpoint


class SplitModel:
    """Runs any chunk of `model`; one model object serves all chunks of a rank.

    Args:
        model: the model; parameters that this rank does not own may be on the meta device (see `release`).
        trace: its recording.
        ranges: [first, end) block of every chunk of the whole model, in chunk order.
        recompute: names of the blocks that backward computes again instead of keeping their activations (training mode
            only).
    Raises: TraceError if the ranges do not cover the blocks or cut where the model cannot be cut.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        ranges: Sequence[tuple[int, int]],
        *,
        recompute: Collection[str] = (),
    ) -> None:
        trace.check_ranges(list(ranges))
        self._model = model
        self._trace = trace
        self._ranges = tuple(ranges)
        self._recompute = frozenset(recompute)
        self._run: _Run | None = None
        self._slot = CurrentForward()  # the same run, for forwards in C++
        self._constants = [seeding.constant_of(f"{name}:leave") for name in trace.blocks]
        self._generators = [torch.default_generator]
        # What a module that did not run itself returned inside a checkpoint of the user's own code, by the
        # checkpoint's frame: it must return the same when backward runs that code again.
        self._replaced: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._ends: list[Tensor] = []
        self._undo: list[Callable[[], None]] = []
        self._outer = list(dict.fromkeys((*trace.prologue, *trace.between, *trace.epilogue, *trace.skipped)))
        self._hooked: list[str] = []
        self._borders: dict[int, tuple[Trace, Borders]] = {}
        self._guard = CallGuard(model, trace, ranges, lambda: self._run is not None, self._entered)
        self.install()

    def run(
        self,
        chunk: int,
        call: Callable[[], Any],
        inputs: list[Tensor],
        key: tuple[int, int, int] | None,
        *,
        only_loss: bool = False,
    ) -> tuple[list[Tensor], Any]:
        """Runs `call`, which calls the model once, as chunk `chunk`.

        Args:
            chunk: index into `ranges`.
            call: calls `model(**micro_batch)`, perhaps inside a loss function.
            inputs: the tensors that the chunk before handed over, in its order; empty for chunk 0.
            key: (seed, step, global micro-batch): dropout masks depend on it and on the module, never on the
                layout. The global generators are left in another state. None: no reseeding (evaluation).
            only_loss: `call` reads nothing but the loss of what the model returns.
        Returns: the tensors that leave and None; for the last chunk an empty list and what `call` returned.
        Raises: SplitError if the forward ran otherwise than recorded, and whatever `call` raises.
        """
        if self._run is not None:
            raise SplitError("a chunk is already running on this model: `run` must not be called from within `call`")
        if not self._undo:  # another SplitModel took its turn
            self.install()
        run = self._begin(chunk, inputs, key)
        result = None
        returned = False
        self._guard.begin(only_loss)
        try:
            self._run = run
            self._slot.begin(run, None)
            with at_home(run.device, self._guard.is_inside):
                result = call()
            returned = True
        except ChunkExit as leave:
            if leave.owner is not self:
                raise
        except (RuntimeError, NotImplementedError) as error:
            of_missing = isinstance(error, MissingWeightsError) or "meta" in str(error)
            if not of_missing or isinstance(error, SplitError):
                raise
            raise SplitError(
                f"chunk {chunk} (blocks {run.lo} to {run.hi - 1}) read a parameter that belongs to another "
                f"chunk: {error}. The recording did not see that read: pass an `example` with all keys of "
                "a training batch."
            ) from error
        finally:
            self._slot.end()  # first: blocks that are skipped without a run would be so silently
            self._run = None
        if run.last:
            if run.position != run.hi:
                raise SplitError(
                    f"the model ran {run.position} of its {run.hi} blocks; the call must run the model's "
                    "whole forward once"
                )
            return [], result
        if returned or run.leaving is None:
            raise SplitError(
                f"the call ended before block '{self._trace.blocks[run.hi - 1]}', the last of chunk "
                f"{chunk}, was done: it must run the model's whole forward once"
            )
        return run.leaving, None

    def take_ends(self) -> list[Tensor]:
        """Returns what the model's last block returned in the runs with gradient since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def install(self) -> None:
        """Puts the instance forwards on the model, in the place of another SplitModel's."""
        try:
            runs: dict[str, list[int]] = {}
            for index, name in enumerate(self._trace.blocks):
                runs.setdefault(name, []).append(index)
            for name, indices in runs.items():
                self._install(name, self._block_forward(name, indices))
            for name in self._outer:
                self._install(name, self._outer_forward(name))
            for name in self._hooked:
                self._note_results_of(name)
            self._guard.install()
            self._undo.append(self._guard.remove)
        except TraceError:
            self.remove()
            raise

    def remove(self) -> None:
        """Takes the instance forwards off the model again. The next `run` puts them back."""
        while self._undo:
            self._undo.pop()()

    def put_aside(self) -> tuple[_Run | None, CallState]:
        """Returns the run under way, for another one to begin."""
        run, self._run = self._run, None
        self._slot.end()
        return run, self._guard.put_aside()

    def take_up(self, state: tuple[_Run | None, CallState]) -> None:
        """Goes on with the run that `put_aside` returned."""
        self._run, calls = state
        self._guard.take_up(calls)
        if self._run is None:
            self._slot.end()
        else:
            self._slot.begin(self._run, self._run.alike)

    # -- one run --

    def _begin(self, chunk: int, inputs: list[Tensor], key: tuple[int, int, int] | None) -> _Run:
        lo, hi = self._ranges[chunk]
        device = inputs[0].device if inputs else self._device()
        seed = None if key is None else seeding.start(key)
        run = _Run(chunk, (lo, hi), hi == len(self._trace.blocks), device, seed, self._constants, inputs)
        if key is not None:
            self._generators = run.generators
        return run

    def _entered(self, found: Trace) -> None:
        """The running chunk calls the model, in a form of which `found` is the recording."""
        run = self._run
        assert run is not None
        if id(found) not in self._borders:
            self._borders[id(found)] = found, Borders(found, self._ranges)
            self._use_outer([name for region in found.around for name in region])
            for name in hooked_modules(found):
                if name not in self._hooked:
                    self._note_results_of(name)
                    self._hooked.append(name)
        _, borders = self._borders[id(found)]
        run.load(borders)
        self._slot.begin(run, run.alike)

    def _loaded(self, run: _Run) -> tuple[Borders, Cargo]:
        """Returns what crosses the chunk's borders. Who calls `model.forward` comes by no hook, and is taken to call it
        as recorded."""
        if run.borders is None or run.cargo is None:
            self._entered(self._trace)
        assert run.borders is not None and run.cargo is not None
        return run.borders, run.cargo

    def _device(self) -> torch.device:
        parameter = next(self._model.get_submodule(self._trace.blocks[0]).parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def _leave(self, run: _Run, index: int, output: Any) -> Any:
        """The chunk's last block is done: ends the forward, at once or as soon as no checkpoint is in the
        way."""
        assert run.cargo is not None
        if run.leave(run.cargo.leave()):
            raise ChunkExit(self)
        # The user's code called torch.utils.checkpoint around this block. An exception through it would leave
        # the checkpoint half-built, so the exit waits for the next module that starts.
        return output

    def _leave_late(self, run: _Run, name: str) -> None:
        if run.checkpoint is not None and group_of_checkpoint() is run.checkpoint:
            raise SplitError(
                "one torch.utils.checkpoint call of the model covers both block "
                f"'{self._trace.blocks[run.hi - 1]}' and '{name}', so the model cannot be cut between "
                "them. Checkpoint each block on its own, or switch that off and set recompute=True."
            )
        raise ChunkExit(self)

    # -- instance forwards --

    def _block_forward(
        self, name: str, indices: Sequence[int]
    ) -> Callable[[nn.Module, Callable[..., Any]], BlockForward]:
        enter = seeding.constant_of(f"{name}:enter")
        leave = self._constants[indices[0]]
        places, calls = frozenset(indices), self._trace.calls

        def make(module: nn.Module, original: Callable[..., Any]) -> BlockForward:
            execute = recomputed(module, original) if name in self._recompute else original
            # Of the blocks that are left out, C++ skips those for which the last one can stand, unless anything is
            # unusual.
            shape_only = ShapeOnly(name, module)

            def forward(*args: Any, **kwargs: Any) -> Any:
                run = self._run
                if run is None:
                    return self._outside(name, original, enter, leave, args, kwargs)
                if run.leaving is not None:
                    self._leave_late(run, name)
                index = run.position
                if index not in places:
                    self._out_of_order(run, name)
                run.enter(index)
                call = calls[index]
                if run.with_grad and not torch.is_grad_enabled():
                    self._refuse_functions(name)
                run.begin_module(enter)
                try:
                    borders, cargo = self._loaded(run)
                    structure = borders.structure(index)
                    if index >= run.lo:
                        run.begin_block(borders.begin(index))
                        output = execute(*args, **kwargs)
                        cargo.note(name, call, output, structure)
                    else:
                        # C++ skips no block while hooks keep what is saved, as where activations leave.
                        output = run.alike if index >= run.alike_from else cargo.whole(name, call, structure)
                        if output is None:  # of a part, as the block has it; code between blocks has the whole
                            args, kwargs = plain_parts((args, kwargs))
                            stand_in = shape_only(run.device, args, kwargs, run.with_grad)
                            output = cargo.put_into(name, call, stand_in)
                        output = self._replace(run, name, output)
                        borders.show(run.chunk, index, self._model, cargo, (args, kwargs))
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
            return block_forward(self._slot, indices[0] if len(indices) == 1 else -1, leave, forward, original)

        return make

    def _outer_forward(self, name: str) -> Callable[[nn.Module, Callable[..., Any]], BlockForward]:
        enter = seeding.constant_of(f"{name}:enter")
        leave = seeding.constant_of(f"{name}:leave")
        skipped = self._trace.skipped

        def make(module: nn.Module, original: Callable[..., Any]) -> BlockForward:
            has_parameters = next(module.parameters(), None) is not None
            shape_only = ShapeOnly(name, module) if has_parameters else None

            def forward(*args: Any, **kwargs: Any) -> Any:
                run = self._run
                if run is None:
                    return self._outside(name, original, enter, leave, args, kwargs)
                if run.leaving is not None:
                    self._leave_late(run, name)
                borders, cargo = self._loaded(run)
                if name in skipped and not borders.runs(name):
                    self._out_of_order(run, name)
                begins = run.begin_module(enter)
                call = run.call_of(name) if begins and shape_only is not None else -1
                try:
                    if run.position < run.lo and shape_only is not None:
                        output = cargo.put_into(name, call, shape_only(run.device, args, kwargs))
                        output = self._replace(run, name, output)
                    else:
                        output = original(*args, **kwargs)
                        cargo.note(name, call, output)
                except BaseException:
                    if begins:
                        run.leave_module()
                    raise
                if begins:
                    run.end_module(leave)
                return output

            return block_forward(self._slot, -1, leave, forward, original)

        return make

    def _note_results_of(self, name: str) -> None:
        """Of a module inside of blocks, whose results hooks hand on."""
        module = self._model.get_submodule(name)
        original = module.forward  # perhaps one that computes again; those of other engines left with the blocks'

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            run = self._run
            if run is not None and run.block is not None and run.cargo is not None:
                call = run.block.call_of(name)
                if call is not None:
                    run.cargo.note(name, call, output)
            return output

        forward.fold3d_split = self  # type: ignore[attr-defined]
        self._undo.append(wrap(module, block_forward(self._slot, -1, 0, forward, original)))

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
        if torch._C._current_graph_task_id() == -1:  # not in backward
            return original(*args, **kwargs)
        seed = seeding.carried()
        if seed is not None:
            reseed(self._generators, seed_inside(seed, enter))
        replaced = self._replaced.get(frame_of_checkpoint(), {}) if self._replaced else {}
        try:
            output = replaced[name] if name in replaced else original(*args, **kwargs)
        except BaseException:
            if seed is not None:
                reseed(self._generators, seed)
            raise
        if seed is not None:
            reseed(self._generators, next_seed(seed, leave))
        return output

    def _replace(self, run: _Run, name: str, output: Any) -> Any:
        """Returns `output`, which stands for what module `name` would return; remembers it for
        checkpoints."""
        if run.with_grad and group_of_checkpoint() is not run.outer_checkpoint:
            frame = frame_of_checkpoint()
            if frame is not None:
                self._replaced.setdefault(frame, {})[name] = output
        return output

    def _use_outer(self, names: Sequence[str]) -> None:
        """Modules around the blocks that only another form of call runs."""
        for name in names:
            if name not in self._outer:
                self._install(name, self._outer_forward(name))
                self._outer.append(name)

    def _install(self, name: str, make: Callable[[nn.Module, Callable[..., Any]], BlockForward]) -> None:
        module = self._model.get_submodule(name)
        own = vars(module).get("forward")  # an instance-level forward of somebody else
        if isinstance(own, BlockForward):
            own.__wrapped__.fold3d_split.remove()  # type: ignore[attr-defined]
            own = vars(module).get("forward")
        if own is not None and isinstance(unwrap(own, stop=lambda f: isinstance(f, BlockForward)), BlockForward):
            raise TraceError(
                f"module '{name}' is already split, and its forward was replaced since; take off what replaced it "
                "before another engine uses the model"
            )
        forward = make(module, module.forward)
        forward.__wrapped__.fold3d_split = self  # type: ignore[attr-defined]
        self._undo.append(wrap(module, forward))

    # -- refusals --

    def _out_of_order(self, run: _Run, name: str) -> None:
        expected = self._trace.blocks[run.position] if run.position < len(self._trace.blocks) else "the end"
        raise SplitError(
            f"block '{name}' ran where {expected} was due. The blocks must run as often and in the order "
            "in which they were recorded, in every forward, and the call must run the model once (no layerdrop, no "
            "second pass)."
        )

    def _refuse_functions(self, name: str) -> None:
        if function := function_around():
            raise SplitError(f"block '{name}' runs inside {function}")
