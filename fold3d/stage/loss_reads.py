"""What a loss function must not read: results of layers that another chunk runs (ForeignTensors), weights of which a
rank has a part (ShardReads).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from fold3d.errors import WAYS_OUT, ConfigError, SplitError
from fold3d.stage.boundary import ChunkRun
from fold3d.tensor_parallel.weight_reads import RefusedReads
from fold3d.torch_private import StorageLabels, running_modules
from fold3d.trace.blocks import modules_around
from fold3d.trace.coat import Coat, Wrap
from fold3d.trace.model_trace import Trace
from fold3d.trace.state import CONTAINERS, attributes_of, has_attributes, holders, set_attribute
from fold3d.trace.wrappers import users_hooks, whole_shape
from fold3d.weights.release import missing


class ForeignTensors:
    """Of one model that is cut. A hook of the user's is shown what stands in for layers that the chunk leaves out, and
    keeps what other chunks have computed of other micro-batches; so do attributes in which modules keep tensors.

    What a hook is shown is noted with the run it comes from, and while the loss function goes on behind the model's
    call each of its operations is looked at: one that reads what is not of this run is an error. A hook that keeps
    tensors in a process that does not compute the loss is an error at once, because nobody would miss them elsewhere.
    Attributes that other chunks set say that they are missing. Where there are no such hooks and attributes, nothing is
    looked at.
    """

    def __init__(self, coat: Coat, model: nn.Module, trace: Trace, *, computes_loss: bool) -> None:
        """Args:
        coat: hooks on the model go with it.
        computes_loss: whether this process has the model's last chunk.
        """
        self._model, self._trace, self._computes_loss = model, trace, computes_loss
        self._blocks = {id(model.get_submodule(name)) for name in trace.blocks}
        self._hooks_ever, self._hooked = -1, list[str]()
        self._coat = coat.enter_context(Coat())
        self._run: ChunkRun | None = None
        self._is_users = False
        self._keeps: bool | None = None
        """Whether a hook keeps tensors; None until a forward has run."""
        self._showing = 0
        """How many modules' hooks run: what these read themselves, to log it, is no matter."""
        self._seen = StorageLabels[tuple[object, str]]()
        """The mark of the run it is of, and who keeps it."""

    def begin(self, run: ChunkRun, *, is_users: bool) -> None:
        """A run of a chunk begins.

        Args:
            is_users: code of the user's computes the loss.
        """
        self._showing = 0
        if self.hooked():
            self._run, self._is_users = run, is_users

    def end(self) -> None:
        """The run is over: nothing of it is kept."""
        if self._run is not None and self._keeps is None:
            self._keeps = False
        self._run = None

    def watched(self, run: ChunkRun) -> AbstractContextManager[Any]:
        """Around the model's forward as a chunk. Raises: SplitError, in it, when the model's own code reads, behind the
        blocks that are left out, what a hook keeps of them: no recording sees hooks of the user's."""
        if not self.hooked() or run.lo == 0 or self._keeps is False:
            return nullcontext()

        def keeper(tensor: Tensor) -> str:
            if run.position < run.lo or self._showing:
                return ""
            of, name = self._seen.get(tensor) or (run.mark, "")
            return "" if of is run.mark else name

        return _Looking(keeper, "the model's forward")

    def carried(self, found: Trace, end: int) -> AbstractContextManager[None]:
        """Around the model's forward as a chunk that ends before block `end`. Raises: SplitError, in it, when it reads
        in front of the blocks what an earlier micro-batch's forward has left behind them: that may not have run.

        Args:
            found: the recording of such a call.
        """
        names = {*self._trace.behind, *found.behind} if end < len(self._trace.blocks) else ()
        return self._carried(names, found) if names else nullcontext()  # nearly all models have none

    @contextlib.contextmanager
    def _carried(self, names: Iterable[str], found: Trace) -> Iterator[None]:
        held = holders(modules_around(self._model, self._trace.blocks)) | dict(self._model.named_modules())
        with Coat() as coat:
            for name in names:
                owner, _, attribute = name.rpartition(".")
                if owner not in held:
                    continue  # it was in an object that is another one by now
                value = getattr(held[owner], attribute, None)
                if type(value) in CONTAINERS:
                    kept = {k for k in value if self._is_kept(name, k, found)} if isinstance(value, dict) else set()
                    instead: Any = carried_container(name, value, kept)
                else:
                    instead = _Carried.named(name)
                coat.put(Wrap.ELSEWHERE, held[owner], {attribute: instead})
            yield

    def _is_kept(self, name: str, key: Any, found: Trace) -> bool:
        """Whether an entry of a dictionary is changed in front of the blocks only, or not at all."""
        traces = [trace for trace in (self._trace, found) if name in trace.behind]
        return all(f"{name}[{key!r}]" in trace.not_behind for trace in traces)

    @contextlib.contextmanager
    def guarded(self, run: ChunkRun | None, given: Iterable[Any], *, is_users: bool) -> Iterator[None]:
        """Around what the loss function does behind the model's call. Raises: SplitError, in it, when it reads what is
        not of `run`, the last chunk's.

        Args:
            given: with what the model was called: that may be read.
            is_users: code of the user's computes the loss.
        """
        looks = any(run is None or of is not run.mark for of, _ in self._seen.values())
        allowed = StorageLabels[bool]()
        for leaf in tree_leaves(list(given)) if looks else ():
            if isinstance(leaf, Tensor):
                allowed[leaf] = True

        def keeper(tensor: Tensor) -> str:
            of, name = self._seen.get(tensor) or (None, "")
            is_ours = (run is not None and of is run.mark) or allowed.get(tensor)
            return "" if is_ours else name

        first = 0 if run is None or not is_users else run.lo
        with Coat() as coat:
            self._hide_attributes(coat, first)
            with _Looking(keeper) if looks else contextlib.nullcontext():
                yield

    def _hide_attributes(self, coat: Coat, first: int) -> None:
        """Attributes that have anything of blocks before `first` are missing."""
        before = tuple(f"{block}." for block in self._trace.blocks[:first])
        for name, of in zip(self._trace.kept, self._trace.kept_of, strict=True) if first else ():
            owner, _, attribute = name.rpartition(".")
            if of < first or name.startswith(before):
                module = self._model.get_submodule(owner)
                stands_in = missing(f"what the attribute {name} keeps")
                coat.put(Wrap.ELSEWHERE, module, {attribute: _with_instead(vars(module).get(attribute), stands_in)})

    def hooked(self) -> str:
        """Returns the name of a module that has hooks of the user's; "" where none has."""
        return next(iter(self._hooked_ones()), "")

    def fill(self, *modules: str) -> float:
        """Returns what stands for floating-point results of modules, left out, which the recording has not seen anybody
        read: NaN shows, if somebody does; hooks of the user's on one of them see it anyway, and are shown 0."""
        return 0.0 if any(name in modules for name in self._hooked_ones()) else math.nan

    def _hooked_ones(self) -> list[str]:
        if self._hooks_ever != RemovableHandle.next_id:  # counts all hooks that were ever registered
            self._install()
        return self._hooked

    def _install(self) -> None:
        self._coat.close()
        self._hooked = []
        for name, module in self._model.named_modules():
            if name and next(users_hooks(module, backward=False), None) is not None:
                self._hooked.append(name)
                note = _Note(self, name)
                self._coat.put(Wrap.BEFORE_HOOKS, module, note.before)
                self._coat.put(Wrap.AFTER_HOOKS, module, note.after)
        self._hooks_ever = RemovableHandle.next_id

    def note(self, name: str, module: nn.Module, values: Any) -> _Shown | None:
        """Hooks of module `name` are shown `values`; returns what looks at what they compute of these, and keep."""
        if self._run is None:
            return None
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                self._see(name, leaf, self._run.mark if self._is_right(name, module, leaf) else None)
        self._showing += 1
        refuses = self._is_users and not self._computes_loss
        return _Shown(name, partial(self._see_computed, name, self._run.mark), refuses, self._note_kept)

    def end_hooks(self) -> None:
        """Those that were shown what `note` was told of are done."""
        self._showing -= 1

    def _note_kept(self) -> None:
        self._keeps = True

    def _see(self, name: str, tensor: Tensor, of: object) -> None:
        self._seen[tensor] = of, f"a hook of {name}"

    def _see_computed(self, name: str, mark: object, tensor: Tensor, read: list[Tensor]) -> None:
        """A hook has computed `tensor` of those in `read`: it is right if they are."""
        labels = map(self._seen.get, read)
        self._see(name, tensor, mark if all(label is None or label[0] is mark for label in labels) else None)

    def _is_right(self, name: str, module: nn.Module, tensor: Tensor) -> bool:
        """Returns whether what a module has just returned is right in this run, and stands in for nothing."""
        run = self._run
        if run is None or run.lo == 0 or run.position > run.lo:
            return True
        if run.position == run.lo and id(module) not in self._blocks:  # between the last block before and the first
            return True
        arrived = run.cargo.arrived.items()
        return any(tensor is one for (of, _), values in arrived if of == name for one in values.values())


def _with_instead(value: Any, stands_in: Tensor) -> Any:
    """Returns `value`, containers and objects however deep, with `stands_in` in the place of its tensors."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return stands_in
        if not has_attributes(leaf) or isinstance(leaf, nn.Module):
            return leaf
        made = copy.copy(leaf)
        for name, one in attributes_of(leaf).items():
            set_attribute(made, name, _with_instead(one, stands_in))
        return made

    return tree_map(of_leaf, value)


def _refuse(name: str) -> NoReturn:
    raise SplitError(
        f"the model's forward reads {name!r} in front of its blocks, and changes it behind them; in a model that is "
        "cut the micro-batch before has not come so far: set pp=1 and segments=1, where nothing is cut"
    )


class _Carried(Tensor):
    """Whoever reads it is told that it is of another micro-batch."""

    carried: str

    @classmethod
    def named(cls, carried: str) -> _Carried:
        """Returns one in the place of the attribute or buffer `carried`."""
        made: _Carried = Tensor().as_subclass(cls)
        made.__dict__["carried"] = carried
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = (getattr(leaf, "__dict__", {}) for leaf in tree_leaves((args, kwargs)))  # containers of ours are leaves
        _refuse(next(held["carried"] for held in known if "carried" in held))

    def __getattr__(self, name: str) -> Any:
        _refuse(self.__dict__["carried"])  # it stands for an object

    def __deepcopy__(self, memo: Any) -> _Carried:
        return self  # a copy of the module that has it, for a recording, reads nothing


_READS_NOTHING = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"} | {
    "append", "appendleft", "extend", "extendleft", "add", "update", "__iadd__", "__ior__", "__class_getitem__",
    "__missing__",
}  # fmt: skip
_ALL = slice(None)


@functools.cache
def _carried_kind(kind: Any) -> Any:
    """Returns a class of containers that are not to be read before they have been emptied; what was put in meanwhile,
    or is found in a dictionary, may be."""
    emptied: type = type(kind.__name__, (kind,), {})

    def refused(method: str) -> Callable[..., Any]:
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_lookup = method in ("__getitem__", "__contains__", "get") and issubclass(kind, dict)
            if is_lookup and kind.__contains__(self, args[0]):
                return getattr(kind, method)(self, *args, **kwargs)
            _refuse(vars(self)["carried"])

        return read

    def empty(self: Any) -> None:
        kind.clear(self)
        self.__class__ = emptied

    def set_item(self: Any, key: Any, value: Any) -> None:
        if key == _ALL and issubclass(kind, list):
            empty(self)
        elif not issubclass(kind, dict):
            _refuse(vars(self)["carried"])
        kind.__setitem__(self, key, value)

    def delete_item(self: Any, key: Any) -> None:
        empty(self) if key == _ALL and issubclass(kind, list) else _refuse(vars(self)["carried"])

    def itself(self: Any, memo: Any) -> Any:
        return self

    writes = {"clear": empty, "__setitem__": set_item, "__delitem__": delete_item}
    reads = [name for name in dir(kind) if name not in _READS_NOTHING and callable(getattr(kind, name))]
    members: dict[str, Any] = {name: refused(name) for name in reads} | writes
    members = {name: one for name, one in members.items() if hasattr(kind, name)}
    return type(kind.__name__, (kind,), members | {"__deepcopy__": itself})


def carried_container(name: str, value: Any, kept: Container[Any]) -> Any:
    """Returns what stands in for the container `value` of the attribute `name` where it is not to be read.

    Args:
        kept: keys of a dictionary whose entries may be read.
    """
    kind: Any = type(value)
    inside: Any = [_Carried.named(name)]  # code in C++ reads lists and tuples without asking them
    if isinstance(value, dict):
        inside = {key: one for key, one in value.items() if key in kept}
    given = (value.default_factory, inside) if kind is defaultdict else (inside,)
    made = _carried_kind(kind)(*given, **({"maxlen": value.maxlen} if kind is deque else {}))
    vars(made)["carried"] = name
    return made


class _Note:
    """Hooks of one module, in front of the user's and behind them."""

    def __init__(self, tensors: ForeignTensors, name: str) -> None:
        self._tensors, self._name = tensors, name
        self._shown: list[_Shown | None] = []

    def before(self, module: nn.Module, args: Any, output: Any) -> None:
        """The user's hooks come next."""
        shown = self._tensors.note(self._name, module, (args, output))
        self._shown.append(shown)
        if shown is not None:
            shown.begin([args, output, *(one for one in tree_leaves((args, output)) if isinstance(one, Tensor))])

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """They are done. Raises: SplitError when they keep a tensor that the loss function would not find."""
        shown = self._shown.pop() if self._shown else None
        if shown is not None:
            self._tensors.end_hooks()
            shown.look()


class _Shown(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What hooks of one module compute of what they are shown, and whether they keep any of it."""

    def __init__(
        self, name: str, see: Callable[[Tensor, list[Tensor]], None], refuses: bool, note_kept: Callable[[], None]
    ) -> None:
        """Args:
        see: told of each tensor that they compute, and of which.
        refuses: to keep a tensor is an error.
        note_kept: called when they keep one.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._see, self._refuses, self._note_kept = name, see, refuses, note_kept
        self._made: list[weakref.ref[Tensor]] = []

    def begin(self, shown: list[Any]) -> None:
        """Hooks are shown these objects next."""
        self._shown, self._counts = shown, list(map(sys.getrefcount, shown))
        self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = [leaf for leaf in arg_tree_leaves(*args, **(kwargs or {})) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self._see(one, read)
                self._made.append(weakref.ref(one))
        return result

    def look(self) -> None:
        """They are done. Raises: SplitError when they keep a tensor, and that is an error."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        more = any(now > then for now, then in zip(map(sys.getrefcount, self._shown), self._counts, strict=True))
        if not (more or any(one() is not None for one in self._made)):
            return
        self._note_kept()
        if self._refuses:
            raise SplitError(
                f"a hook of {self._name} keeps a tensor, and the loss function, which another process computes, would "
                f"not find it there. {WAYS_OUT}; what is only to be logged may be kept as a number (.item())"
            )


class _Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, keeper: Callable[[Tensor], str], who: str = "the loss function") -> None:
        """Args:
        keeper: who keeps a tensor that must not be read; "" for others.
        who: reads.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeper, self._who = keeper, who

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in arg_tree_leaves(*args, **(kwargs or {})):
            if isinstance(leaf, Tensor) and (keeper := self._keeper(leaf)):
                raise SplitError(
                    f"{self._who} reads what {keeper} keeps of a layer that another chunk runs: what is there "
                    f"is not of this micro-batch, or stands in for it. {WAYS_OUT}"
                )
        return func(*args, **(kwargs or {}))


class ShardReads:
    """Watches a loss function in every step: what it reads may depend on the step.

    What blocks do with their weights was proved, and so was what an embedding and a head do. A penalty on
    `model.parameters()` in a loss function or around the blocks, a product with an embedding's weight, or a call of a
    part of a block would see this rank's parts; a penalty on a weight whose gradient is the sum over the ranks would
    count once on each. Both would be wrong without a word.

    Args:
        model: whose blocks may read their weights while they run, and whose other modules theirs.
        parameters: canonical name -> parameter.
        blocks: names of the blocks.
        summed: names of the parameters whose gradient is summed over the group.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, Tensor], blocks: Iterable[str], summed: Collection[str]
    ) -> None:
        self._modules = {id(module) for module in model.modules()}
        self._blocks = {name: id(model.get_submodule(name)) for name in blocks}
        self._names = {
            id(one): name for name, one in parameters.items() if name in summed or whole_shape(one) != one.shape
        }

    def watched(self) -> AbstractContextManager[Any]:
        """Around code of a loss function. Raises: ConfigError, in it, where a weight is read of which there is a part,
        or whose gradient is summed."""
        return RefusedReads(self._names, self._is_around, _error) if self._names else nullcontext()

    def _is_around(self, name: str) -> bool:
        """Returns whether what the caller's caller runs is around the modules that may read the weight."""
        of_block = {key for block, key in self._blocks.items() if name.startswith(f"{block}.")}
        return (of_block or self._modules).isdisjoint(running_modules())


def _error(name: str, read: Tensor) -> ConfigError:
    reads = f"code around the model's blocks, such as a loss function, reads the weight '{name}'"
    ways_out = "put such a term into the optimizer (weight_decay is an L2 penalty), or set tp=1"
    if read.shape == whole_shape(read):
        return ConfigError(
            f"{reads}. Its gradient is the sum of what the ranks of the tensor-parallel group compute of their parts "
            "of the sequence, so what that code adds would count once on each. Set sequence_parallel=False, "
            f"{ways_out}"
        )
    return ConfigError(
        f"{reads}, of which each rank of the tensor-parallel group has a part ({tuple(read.shape)} of "
        f"{tuple(whole_shape(read))}), so it would see other values than on one process. Leave the weight whole with "
        f"tp_plan={{'{_module_of(name)}': 'replicate'}}, {ways_out}"
    )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name
