"""The coat: what fold3d puts on the user's modules, in which order, who does it, and how all of it comes off again.

`Wrap` is the whole list. A component puts what it has on by `Coat.put(row, module, thing)`; when the coat is closed, or
what puts it on fails half-way, modules have again what they had, to the entry of `vars()`.

While it is on, copies of modules, deep or pickled, are the user's: forwards are copied as those from before, hooks as
ones that do nothing, and a pickled one needs no fold3d to be read. A forward of the coat is an object of C++, at which
torch.compile of the user's interrupts its graph. Parameters are no part of it: what a rank has of them stays
(`fold3d/weights`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from enum import Enum
from inspect import unwrap
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from fold3d._C import BlockForward, CurrentForward, block_forward
from fold3d.trace.state import ABSENT, attributes_of, set_attribute
from fold3d.trace.wrappers import drop_hooks, is_ours

_FORWARD, _ATTRIBUTES, _INSTEAD = "forward", "attributes", "instead"
_BEFORE: Any = ("register_forward_pre_hook", {})
"""Next to the forward, behind hooks of the user's."""
_BEFORE_NAMED: Any = ("register_forward_pre_hook", {"with_kwargs": True})
_FIRST: Any = ("register_forward_pre_hook", {"prepend": True})
_AFTER: Any = ("register_forward_hook", {"prepend": True})
"""Next to the forward, before hooks of the user's."""
_LAST: Any = ("register_forward_hook", {})
_SUMMED: Any = ("register_post_accumulate_grad_hook", {})
_STATED: Any = ("register_state_dict_post_hook", {})


class Wrap(Enum):
    """What is put on: how, by which component, on what and what for. Of forwards on one module the first is the
    innermost, and none may come beneath one that is on already."""

    # tensor_parallel: of a block whose ranks share its weights
    PART_ATTRIBUTES = _ATTRIBUTES, "tensor_parallel", "numbers of heads and channels are those of a rank's part"
    REGION = _FORWARD, "tensor_parallel", "modules where the ranks' shares begin or end: what they take, or the sum"
    UNPROVED = (_BEFORE,), "tensor_parallel", "modules that the proof did not run: refuse to"
    GATHERED = _FORWARD, "tensor_parallel", "modules that take the whole sequence: gather it"
    DIVIDED = _FORWARD, "tensor_parallel", "the block: takes its part of arguments, draws its part of random numbers"
    LENGTH = (_BEFORE_NAMED,), "tensor_parallel", "the first block: notes how long the whole sequence is"
    HANDED = (_AFTER,), "tensor_parallel", "blocks but for the last: a stand-in for the whole sequence"
    PARTS = _FORWARD, "tensor_parallel", "the block, and modules that hooks look at: note the parts they return"
    WHOLE = (_AFTER,), "tensor_parallel", "the model and what holds its blocks: return the whole of parts"
    VOCABULARY = _FORWARD, "tensor_parallel", "embeddings and heads: work on a rank's rows"
    CHUNKED_LOSS = _FORWARD, "tensor_parallel", "the head: returns a stand-in for the logits"
    # stage: what runs of the model, and when
    COMPILED = _FORWARD, "stage", "blocks: run compiled code"
    RECOMPUTED = _FORWARD, "stage", "blocks or modules inside: keep no activations"
    SEED = (_BEFORE,), "stage", "of a whole model, blocks and modules around them: the seed of their dropout"
    SEED_AFTER = (_AFTER,), "stage", "the same, behind them"
    FIRST = (_BEFORE,), "stage", "the first block: what has been drawn so far"
    ENDS = (_AFTER,), "stage", "the last block: notes what it returned"
    CHUNK = _FORWARD, "stage", "blocks and modules around them: run, or return what the chunk received"
    NOTED = _FORWARD, "stage", "modules inside of blocks whose results hooks hand on: note them"
    BEFORE_HOOKS = (_AFTER,), "stage", "modules with hooks of the user's: note what these are shown"
    AFTER_HOOKS = (_LAST,), "stage", "the same: look at what they keep"
    # data_parallel
    READY = (_FIRST,), "data_parallel", "modules with parameters: wait until these are up to date"
    GRADIENT = (_SUMMED,), "data_parallel", "parameters: count gradients"
    # for a moment
    WEIGHT = _INSTEAD, "tensor_parallel", "modules of divided blocks, while they run: read this in a parameter's place"
    ELSEWHERE = _INSTEAD, "stage", "attributes of blocks that other chunks run, while the loss is computed: missing"
    GENERATE = _INSTEAD, "trainer", "the model, in a `prediction_step` of the user's: generates on all chunks"
    RESTS = _FORWARD, "stage", "the model and what holds its blocks: the loss function rests where it calls them"
    SHOWN = _FORWARD, "stage", "modules that a chunk leaves out: show hooks what these returned elsewhere"
    STAND_IN = _FORWARD, "splitting", "blocks of a copy: return random numbers of the right shapes"
    # for as long as parameters hold parts
    STATE_REFUSED = (_STATED,), "weights", "modules that hold parts: no state of parts"
    CALL_REFUSED = (_BEFORE,), "weights", "the same, without an engine: no results of parts"

    def __init__(self, how: Any, component: str, why: str) -> None:
        self.how, self.component, self.why = how, component, why
        self.place = len(type(self).__members__)

    def may_be_on(self, below: Wrap) -> bool:
        """Returns whether a forward of this row may come around one of `below`. Blocks are divided one by one, and may
        have modules in common."""
        return below.place <= self.place or self.component == below.component == "tensor_parallel"


class Hook:
    """A hook of a module. That of a copy, deep or pickled, does nothing."""

    def __init__(self, row: Wrap | None, call: Callable[..., Any]) -> None:
        self.row, self._call = row, call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook(None, _nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, does nothing, and is Python's own


def _nothing(*_: Any) -> None:
    """What a hook in a copy calls."""


class Coat(contextlib.ExitStack):
    """What is on the modules of a model; `close` takes it off, the last first. A part of it that goes earlier is a Coat
    that it is given by `enter_context`."""

    def put(
        self,
        row: Wrap,
        on: object,
        thing: Any,
        slot: CurrentForward | None = None,
        block: int = -1,
        constant: int = 0,
    ) -> None:
        """Puts a forward, a hook or attributes, by name, on a module; a hook on a parameter, attributes on an object.

        Args:
            slot, block, constant: of a forward that C++ may skip, see `block_forward`.
        """
        if row.how == _FORWARD:
            assert isinstance(on, nn.Module)
            below = vars(on).get("forward")
            assert not isinstance(below, BlockForward) or row.may_be_on(row_of(below)), (row, row_of(below))
            thing.__wrapped__, thing.fold3d_row = on.forward, row  # it has the signature of what is beneath
            self._forward(on, block_forward(slot or CurrentForward(), block, constant, thing, on.forward))
        elif row.how == _ATTRIBUTES:
            assert isinstance(on, nn.Module)
            self._attributes(on, thing)
        elif row.how == _INSTEAD:
            own = attributes_of(on)
            for name, value in thing.items():
                self.callback(set_attribute, on, name, own.get(name, ABSENT))
                set_attribute(on, name, value)
        else:
            hook = Hook(row, thing) if isinstance(on, nn.Module) else thing
            for register, options in row.how:
                self.callback(getattr(on, register)(hook, **options).remove)

    def _forward(self, module: nn.Module, forward: BlockForward) -> None:
        own = vars(module).get("forward")
        module.forward = forward

        def undo() -> None:
            if vars(module).get("forward") is not forward:
                return  # somebody has put theirs around it since
            if own is None:
                del module.forward
            else:
                module.forward = own

        self.callback(undo)

    def _attributes(self, module: nn.Module, values: Mapping[str, Any]) -> None:
        whole: dict[str, Any] = vars(module).setdefault(_WHOLE_ATTRIBUTES, {})
        for name, value in values.items():
            whole.setdefault(name, getattr(module, name))
            setattr(module, name, value)
        self.callback(_restore_attributes, module)


_WHOLE_ATTRIBUTES = "_fold3d_whole_attributes"
"""Where a module keeps those that `PART_ATTRIBUTES` hides: so copies of it can be given them."""


def _restore_attributes(module: nn.Module) -> None:
    for name, value in vars(module).pop(_WHOLE_ATTRIBUTES, {}).items():
        setattr(module, name, value)


def row_of(forward: BlockForward) -> Wrap:
    """Returns as which row a forward of the coat is on its module."""
    found: Wrap = forward.__wrapped__.fold3d_row  # type: ignore[attr-defined]
    return found


def row_beneath(module: nn.Module) -> Wrap | None:
    """Returns the row of the forward around which somebody has put one of theirs, as far as they say so; else None."""
    own = vars(module).get("forward")
    found = unwrap(own, stop=lambda one: isinstance(one, BlockForward)) if callable(own) else None
    return row_of(found) if isinstance(found, BlockForward) and found is not own else None


def copy_without_coat(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Returns a deep copy without what is left of the coat, and without forwards of others that are functions: these
    are not copied and would run the original module. Bound methods, such as accelerate's, are bound to the copy, and so
    are those that they have around them, such as the forward that was there before (TRL's).

    Args:
        memo: as copy.deepcopy takes it.
    """
    made: nn.Module = copy.deepcopy(module, memo)
    _drop_coat(made, memo)
    return made


def _drop_coat(made: nn.Module, memo: Mapping[int, Any]) -> None:
    for module in made.modules():
        drop_hooks(module, is_ours)
        _restore_attributes(module)
        own = vars(module).get("forward")
        is_own = isinstance(own, MethodType) and own == MethodType(type(module).forward, module)
        if is_own or isinstance(own, (FunctionType, BlockForward)):
            del module.forward
        elif isinstance(own, MethodType) and isinstance(own.__func__, FunctionType):
            module.forward = MethodType(_of_copies(own.__func__, memo), own.__self__)


def _of_copies(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    """Returns a function whose variables are methods of copies, where they are methods of what was copied."""

    def of_copy(cell: CellType) -> CellType:
        try:
            held = cell.cell_contents
        except ValueError:  # it is not set yet
            return cell
        owner = memo.get(id(held.__self__)) if isinstance(held, MethodType) else None
        return cell if owner is None else CellType(MethodType(held.__func__, owner))

    cells = function.__closure__ or ()
    made = tuple(map(of_copy, cells))
    if made == cells:
        return function
    code, known, name = function.__code__, function.__globals__, function.__name__
    found = FunctionType(code, known, name, function.__defaults__, made)
    found.__kwdefaults__ = function.__kwdefaults__
    vars(found).update(vars(function))
    return found
