"""SplitForwards: forwards on the instances of a model's modules, by which it runs as one chunk of several.

blocks before the chunk, and modules with
parameters that run before it   -> return what the chunk received of their results, and zeros of the right shapes
                                   for what nothing reads any more
the chunk's last block          -> what crosses the border behind it leaves, and an exception ends the forward
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
from fold3d._C import BlockForward, CurrentForward, block_forward, next_seed, reseed, seed_inside
from fold3d.errors import TraceError
from fold3d.stage.blocks.hooked_modules import hooked_modules
from fold3d.stage.cargo import Borders
from fold3d.stage.chunk_run import ChunkExit, ChunkRun
from fold3d.stage.loss.loss_run import refuse_part
from fold3d.stage.recompute import recomputed
from fold3d.stage.shapes import ShapeOnly
from fold3d.stage.whole_model import WholeModel
from fold3d.tensor_parallel.checkpoints import frame_of_checkpoint, function_around, group_of_checkpoint
from fold3d.tensor_parallel.results.lazy_whole import plain_parts
from fold3d.trace.errors import SplitError
from fold3d.trace.model_trace import Trace
from fold3d.trace.wrappers import wrap


class SplitForwards:
    """Of one model. Without a run under way they do what the modules' own do.

    Args:
        model, trace, recompute, beneath: see `SplitModel`.
    """

    def __init__(self, model: nn.Module, trace: Trace, recompute: Collection[str], beneath: WholeModel | None) -> None:
        self._model, self._trace = model, trace
        self._recompute, self._beneath = frozenset(recompute), beneath
        self._run: ChunkRun | None = None
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
        except TraceError:
            self.remove()
            raise

    def remove(self) -> None:
        """Takes the instance forwards off the model again. The next `run` puts them back."""
        while self._undo:
            self._undo.pop()()

    def _borders_in(self, found: Trace) -> Borders:
        """Returns what crosses borders where the model is called in a form of which `found` is the recording."""
        if id(found) not in self._borders:
            self._borders[id(found)] = found, Borders(found)
            self._use_outer([name for region in found.around for name in region])
            for name in hooked_modules(found):
                if name not in self._hooked:
                    self._note_results_of(name)
                    self._hooked.append(name)
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
                run.begin_module(enter)
                try:
                    borders, cargo = run.borders, run.cargo
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
                run = self._running(name)
                if run is None:
                    return self._outside(name, original, enter, leave, args, kwargs)
                if name in skipped and not run.borders.runs(name):
                    self._out_of_order(run, name)
                begins = run.begin_module(enter)
                call = run.call_of(name) if begins and shape_only is not None else -1
                try:
                    if run.position < run.lo and shape_only is not None:
                        output = run.cargo.put_into(name, call, shape_only(run.device, args, kwargs))
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

            return block_forward(self._slot, -1, leave, forward, original)

        return make

    def _note_results_of(self, name: str) -> None:
        """Of a module inside of blocks, whose results hooks hand on."""
        module = self._model.get_submodule(name)
        original = module.forward  # perhaps one that computes again; those of other engines left with the blocks'

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            run = self._run
            if run is not None and run.block is not None:
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
            refuse_part(f"its module '{name}'")
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

    def _replace(self, run: ChunkRun, name: str, output: Any) -> Any:
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
            other = own.__wrapped__.fold3d_split  # type: ignore[attr-defined]
            if self._beneath is None or other is not self._beneath.checkpoints:
                other.remove()
            own = vars(module).get("forward")
        beneath = isinstance(own, BlockForward)
        if (
            not beneath
            and own is not None
            and isinstance(unwrap(own, stop=lambda f: isinstance(f, BlockForward)), BlockForward)
        ):
            raise TraceError(
                f"module '{name}' is already split, and its forward was replaced since; take off what replaced it "
                "before another engine uses the model"
            )
        forward = make(module, module.forward)
        forward.__wrapped__.fold3d_split = self  # type: ignore[attr-defined]
        self._undo.append(wrap(module, forward))

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
