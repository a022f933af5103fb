"""Where code of the user's keeps values by name, what tells that one has changed (Namespace), and what a loss function
finds as it left it when it goes on (KeptAttributes).
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import hashlib
import itertools
import operator
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fold3d.device import library_rng_state, same_library_rng_state, seed_libraries, set_library_rng_state
from fold3d.errors import SplitError
from fold3d.torch_private import version_of
from fold3d.trace.compound import is_compound
from fold3d.trace.state import (
    ABSENT,
    MOST,
    OF_EVERY_MODULE,
    PLAIN,
    Cells,
    View,
    attributes_of,
    has_attributes,
    holders,
    is_others_iterator,
    is_users,
    is_users_object,
    position_of,
    slots_of,
)
from fold3d.trace.wrappers import users_hooks

_PLAIN = tuple(PLAIN)
_CONSTANTS = PLAIN | {type, FunctionType, BuiltinFunctionType, ModuleType, torch.dtype, torch.device}
"""Of values that are the same as long as they are the same object."""
_LISTS = (list, tuple, deque)
_OF_EVERY_MODULE = (OF_EVERY_MODULE | {"forward"}) - {"training"}
"""Not attributes of the user's: forwards are put on while a loss function runs."""
UNKNOWN = object()
"""In the place of a value that was not kept."""


_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the attributes of other classes are constant


class LongContainer(NamedTuple):
    """One that is too long to copy it for every micro-batch."""

    value: Any
    length: int
    """When it was looked at."""

    def as_it_was(self) -> Any:
        """Returns a container with its first entries."""
        if len(self.value) == self.length or not isinstance(self.value, (dict, list, deque)):
            return self.value
        first = itertools.islice(self.value.items() if isinstance(self.value, dict) else self.value, self.length)
        return type(self.value)(first)


def as_it_was(kept: Any) -> Any:
    """Returns the value of which `kept` is what was kept."""
    return kept.as_it_was() if isinstance(kept, LongContainer) else kept


class _Long(NamedTuple):
    """The version of such a container."""

    number: int
    length: int


Kind = type | CodeType | tuple[type, ...]
"""Class of an object, code of a function; of a class the class, in a tuple; of buffers the module's and Tensor."""
Version = Any
"""What differs once a value has changed."""


class Namespace:
    """Values by name: attributes of an object, variables around a function, global variables that it uses.

    Attributes:
        values: they are read and set here.
        kind: the same for namespaces that the same code uses.
        what: for messages.
        owner: the object whose attributes they are, where its class can note which are set; None otherwise.
    """

    def __init__(self, values: MutableMapping[str, Any], kind: Kind, what: str, owner: object = None) -> None:
        self.values, self.kind, self.what, self.owner = values, kind, what, owner
        self._looked: tuple[tuple[object, ...], Contents] | None = None
        """What tells that nothing has been set since all values were constants, and what there was."""

    def contents(self) -> Contents:
        """Returns what it holds now; while that is the same constants, the same object."""
        values = self.values
        now = values.objects() if isinstance(values, View) else (*values, *values.values())
        if self._looked is not None:
            then, contents = self._looked
            if len(now) == len(then) and all(map(operator.is_, now, then)):
                return contents
        contents = Contents(dict(values))
        self._looked = (now, contents) if _CONSTANTS.issuperset(map(type, contents.values.values())) else None
        return contents


class Contents:
    """What a namespace held at one time.

    Attributes:
        values: by name.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._versions = {n: one if type(one) in PLAIN else version(one) for n, one in values.items()}

    def changed(self, before: Contents) -> set[str]:
        """Returns the names of what was set, changed or deleted since `before`."""
        if self is before:
            return set()
        inside = {name for name, one in self._versions.items() if one != before._versions.get(name, ABSENT)}
        return inside | _set_since(before.values, self.values)

    def counted(self, before: Contents) -> set[str]:
        """Returns the names of what was there before, and is another number or text, or has another content, now; new
        entries of a dictionary or a set are none."""
        if self is before:
            return set()
        return {
            name
            for name, then in before._versions.items()
            if then != self._versions.get(name, then)
            and before.values[name] is not None
            and not _has_grown(then, self._versions[name])
        }

    def copies(self) -> dict[str, Any]:
        """Returns the values, with containers of their own; of context variables what they hold."""
        values = {n: one.get(None) if isinstance(one, ContextVar) else one for n, one in self.values.items()}
        return {name: _copied(value, None) for name, value in values.items() if is_state(value)}

    def kept(self, names: Collection[str], before: Contents) -> dict[str, Any]:
        """Returns the values that `names` had, and what else is a number or text; UNKNOWN in the place of others, which
        may be large. Containers are copies, and so are tensors that were written to since `before`."""
        known, simple = before._versions, PLAIN
        return {
            name: value if type(value) in simple else _copied(value, known.get(name)) if name in names else UNKNOWN
            for name, value in self.values.items()
        }


class _Attributes(View):
    """Attributes of an object without a dictionary, or of a class, that are no functions."""

    def __init__(self, one: object) -> None:
        self._one = one

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._one, name)
        except AttributeError:
            raise KeyError(name) from None

    def objects(self) -> tuple[object, ...]:
        if not isinstance(self._one, type):
            return super().objects()
        held = vars(self._one)
        return (*held, *held.values())

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._one, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._one, name)

    def __iter__(self) -> Iterator[str]:
        if isinstance(self._one, type):
            return (
                name for name, value in vars(self._one).items() if name[:2] != "__" and not hasattr(value, "__get__")
            )
        return (name for name in slots_of(type(self._one)) if hasattr(self._one, name))


class _Globals(View):
    """Global variables that a function uses, besides functions, classes and modules."""

    def __init__(self, function: FunctionType) -> None:
        self._all = function.__globals__
        self._names = [name for name in _names_in(function.__code__) if self._is_state(name)]

    def objects(self) -> tuple[object, ...]:
        return tuple(map(self._all.get, self._names, itertools.repeat(ABSENT)))

    def _is_state(self, name: str) -> bool:
        value = self._all.get(name, ABSENT)
        return value is not ABSENT and not isinstance(value, (BuiltinFunctionType, FunctionType, ModuleType, type))

    def __getitem__(self, name: str) -> Any:
        return self._all[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._all[name] = value

    def __delitem__(self, name: str) -> None:
        del self._all[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._all)


def _names_in(code: CodeType, *, texts: bool = False) -> Iterator[str]:
    """Yields names that the code uses; `texts`: and texts in it, which may be names of attributes."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_in(one, texts=texts)
        elif texts and isinstance(one, str):
            yield one


_LOADS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))


@functools.lru_cache(maxsize=1024)
def _loaded(code: CodeType, last: int, *, attributes: bool = False) -> frozenset[str]:
    """Returns the names of variables around a function that its code uses up to the instruction at offset `last`.

    Args:
        attributes: of attributes instead, and texts that may be names of some.
    """
    so_far = [one for one in dis.get_instructions(code) if one.offset <= last]
    if attributes:
        texts = {one.argval for one in so_far if one.opname == "LOAD_CONST" and isinstance(one.argval, str)}
        names = texts | {str(one.argval) for one in so_far if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    else:
        names = {str(one.argval) for one in so_far if one.opname in _LOADS}
    inner = (one.argval for one in so_far if isinstance(one.argval, CodeType))
    return frozenset(names).union(*(_loaded(one, len(one.co_code), attributes=attributes) for one in inner))


def _run_so_far(frames: Iterable[FrameType]) -> dict[CodeType, int]:
    """Returns the code that has run where `frames` are, up to which instruction: theirs, and that of the user's
    functions whose names it uses."""
    found: dict[CodeType, int] = {}
    own = [frame for frame in frames if is_users(str(frame.f_globals.get("__name__")))]
    todo = [(frame.f_code, frame.f_lasti, frame.f_globals) for frame in own]
    while todo:
        code, last, around = todo.pop()
        if last <= found.get(code, -1):
            continue
        found[code] = last
        for one in (around.get(name) for name in _loaded(code, last)):
            if isinstance(one, FunctionType) and is_users(one.__module__):
                todo.append((one.__code__, len(one.__code__.co_code), one.__globals__))
    return found


def namespaces_of(objects: Iterable[object], model: nn.Module) -> list[Namespace]:
    """Returns where code keeps values that is reached from `objects`: functions, and objects with methods.

    A function's are its attributes, the variables around it, the global ones that it uses, and dictionaries that are
    given to it once for all; those of an object its attributes and those of its class. Functions and objects of the
    user's that are found there are looked at likewise; `model` is not.
    """
    found: list[Namespace] = []
    seen = {id(model)}
    todo: deque[tuple[object, bool]] = deque((one, True) for one in objects)
    while todo and len(found) < MOST:
        one, is_named = todo.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            todo.extend((each, is_named) for each in (one.func, *one.args, *one.keywords.values()))
        elif isinstance(one, MethodType):
            todo.extend(((one.__self__, is_named), (one.__func__, is_named)))
        elif isinstance(one, FunctionType):
            if is_named or is_users(one.__module__):
                what = f"variable of {one.__qualname__}"
                spaces = [Namespace(each, one.__code__, what) for each in (Cells(one), _Globals(one), vars(one))]
                found += [space for space in spaces if space.values]
                todo.extend((value, False) for space in spaces for value in space.values.values())
                todo.extend(
                    (value, True) for value in (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
                )
                todo.extend(
                    (one.__globals__[name], False) for name in _names_in(one.__code__) if name in one.__globals__
                )
        elif has_attributes(one) and (is_named or is_users(type(one).__module__) or type(one) is threading.local):
            kind = type(one)
            found.append(namespace_of(one))
            todo.extend((value, False) for value in found[-1].values.values())
            if is_users(kind.__module__):
                todo.append((kind, True))
        elif type(one) is dict and is_named and len(one) <= MOST:
            found.append(Namespace(one, (dict,), "entry of an argument of the function"))
        elif isinstance(one, type) and (is_named or is_users(one.__module__)):
            found.append(Namespace(_Attributes(one), (one,), f"attribute of the class {one.__name__}"))
    return found


_UNSEEN = frozenset(
    (
        *("data", "set_", "untyped_storage", "data_ptr", "numpy", "asarray", "__array__", "from_numpy", "from_dlpack"),
        *("batch_norm", "instance_norm", "native_batch_norm", "ops", "_unsafe_preserve_version_counter"),
    )
)
"""Names in code that may write to a tensor which does not notice."""


def may_write_unseen(model: nn.Module) -> bool:
    """Returns whether code of the user's that the model's modules run, or hooks, has a way to write to tensors that
    leaves their version as it is (`buffer.data.mul_(0.9)`)."""
    return names_one_of(_UNSEEN, users_code(model))


def names_one_of(names: frozenset[str], code: Iterable[object]) -> bool:
    """Whether a function of the user's among `code` has one of the names in it."""
    functions = (one for one in code if isinstance(one, FunctionType) and is_users(one.__module__))
    return any(not names.isdisjoint(_names_in(one.__code__, texts=True)) for one in functions)


def users_code(model: nn.Module) -> Iterator[object]:
    """Yields functions and classes that the model's modules run, with hooks, and what these use of the user's; other
    objects on the way, too."""
    todo: deque[object] = deque()
    for module in model.modules():
        todo.extend((type(module), *users_hooks(module)))
        todo.extend(one for name, one in vars(module).items() if name == "forward" or name not in _OF_EVERY_MODULE)
    seen: dict[int, object] = {}
    while todo:
        one = todo.popleft()
        if id(one) in seen or isinstance(one, (*_PLAIN, Tensor, nn.Module)):
            continue
        seen[id(one)] = one
        yield one
        if isinstance(one, (staticmethod, classmethod, MethodType)):
            todo.extend((one.__func__, getattr(one, "__self__", None)))
        elif isinstance(one, (property, functools.partial)):
            todo.extend((one.fget, one.fset) if isinstance(one, property) else (one.func, one.args, one.keywords))
        elif isinstance(one, FunctionType):
            todo.extend(Cells(one).values())
            names = set(_names_in(one.__code__, texts=True)) if is_users(one.__module__) else set()
            todo.extend(one.__globals__[name] for name in names if name in one.__globals__)
        elif isinstance(one, type):
            todo.extend(value for kind in one.__mro__ if is_users(kind.__module__) for value in vars(kind).values())
        elif isinstance(one, (dict, *_LISTS)):
            todo.extend(one.values() if isinstance(one, dict) else one) if len(one) <= MOST else None
        elif is_users_object(one):
            todo.extend((type(one), *namespace_of(one).values.values()))
        elif hasattr(one, "__wrapped__"):
            todo.append(one.__wrapped__)


class SharedValues:
    """Global variables, attributes of classes, variables of functions and weights that are not trained, which the
    forwards of the user's modules use.

    Where a model is cut, chunks of other micro-batches run between those of one, and other chunks in other processes:
    what counts there, counts otherwise than in one process. What is made once, such as a table of masks, does not.
    """

    def __init__(self, model: nn.Module, *, unseen: bool = False) -> None:
        """Args:
        unseen: whether code of the user's may write to a weight without a trace, see `may_write_unseen`.
        """
        kinds = dict.fromkeys(type(module) for module in model.modules() if is_users(type(module).__module__))
        functions: list[Any] = [one for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
        held = holders((name, one) for name, one in model.named_modules() if type(one) in kinds)
        called = (FunctionType, MethodType, functools.partial)
        functions += [one for each in held.values() for one in attributes_of(each).values() if isinstance(one, called)]
        known = set(map(id, held.values()))  # what they keep is looked at with the modules
        self._spaces = [
            space
            for space in namespaces_of([*functions, *kinds], model)
            if not isinstance(space.owner, nn.Module) and id(space.owner) not in known
        ]
        self._flags: dict[tuple[int, str], bool] = {}
        weights = model.named_parameters() if kinds else ()
        # What is quantised is packed anew by its library.
        self._parameters = {name: one for name, one in weights if not is_compound(one)}
        self._unseen = unseen
        self._step: object = None
        self._not_trained: list[tuple[str, nn.Parameter]] = []
        """As the step began; code that runs in it may not freeze weights."""

    @contextlib.contextmanager
    def unchanged(self, step: object = None) -> Iterator[None]:
        """Around the model's forward as a chunk. Raises: SplitError when such a value is another one behind it.

        Args:
            step: the same in all of a step; None: there is no other forward in it.
        """
        if step is None or step != self._step:
            self._step = step
            with torch._C.DisableTorchFunctionSubclass():  # as in `ModelState.trained`
                self._not_trained = [(name, one) for name, one in self._parameters.items() if not one.requires_grad]
        before, frozen = self._contents(), self._frozen()
        yield
        written = [name for name, version in self._frozen().items() if frozen.get(name, version) != version]
        if written:
            raise SplitError(
                f"the model's forward writes to {written[0]!r}, a weight that is not trained, and its code around the "
                "blocks runs once for each chunk of the model: do that in a callback (on_step_end), or set pp=1 and "
                "segments=1, where nothing is cut"
            )
        if all(map(operator.is_, self._contents(), before)):
            return  # all of it constants, as of most models
        for number, name in _counted(self._spaces, before, self._flags):
            raise SplitError(
                f"the model's forward changes {name!r} ({self._spaces[number].what}). In a model that is cut, chunks "
                "and micro-batches run in another order than in one process, and in several processes, so it would not "
                "count what it counts there: keep it on the module (self.x), or set pp=1 and segments=1"
            )

    def _contents(self) -> list[Contents]:
        return [space.contents() for space in self._spaces]

    def _frozen(self) -> dict[str, tuple[int, ...]]:
        """Returns of each weight that is not trained how often it was written to, and what else tells; where code of
        the user's may write without a trace (`weight.data.mul_(0.9)`), a sum of its bits, too."""
        with torch._C.DisableTorchFunctionSubclass():  # as in `ModelState.trained`
            return {
                name: (one._version, *_marks_of(one, self._unseen))
                for name, one in self._not_trained
                if not one.requires_grad
            }

    @contextlib.contextmanager
    def put_back(self, changed: list[str]) -> Iterator[None]:
        """Around a run that leaves no traces; the names of what it has changed are added to `changed`."""
        with put_back(self._spaces) as found:
            yield
        changed += found


@contextlib.contextmanager
def put_back(spaces: Sequence[Namespace]) -> Iterator[list[str]]:
    """Around what leaves no traces in `spaces`; what it has counted there is as it was behind it, and its names are in
    the list that this yields."""
    before = [space.contents() for space in spaces]
    values = [then.copies() for then in before]
    changed: list[str] = []
    yield changed
    for number, name in _counted(spaces, before):
        changed.append(f"{name} ({spaces[number].what})")
        _put_back(spaces[number].values, name, values[number].get(name))


def _counted(
    spaces: Sequence[Namespace], before: Sequence[Contents], flags: dict[tuple[int, str], bool] | None = None
) -> Iterator[tuple[int, str]]:
    """Yields which values count, see `Contents.counted`, by number of the namespace and name.

    Args:
        flags: gets what truth values become first. To become that is none: it says that something has been done.
    """
    for number, (space, then) in enumerate(zip(spaces, before, strict=True)):
        for name in sorted(space.contents().counted(then)):
            value = space.values.get(name)
            if flags is None or not isinstance(value, bool) or flags.setdefault((number, name), value) is not value:
                yield number, name


def _marks_of(weight: Tensor, with_bits: bool) -> tuple[int, ...]:
    """Returns where a weight is in memory, and a sum of its bits, for which the host waits for its device."""
    value = weight.data
    if type(value) is not Tensor or value.layout != torch.strided or value.is_meta or value.is_quantized:
        return ()
    if not with_bits:
        return (value.data_ptr(),)
    parts = torch.view_as_real(value) if value.is_complex() else value
    return value.data_ptr(), int(parts.contiguous().view(_WHOLE_NUMBERS[parts.element_size()]).sum())


_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ModelState:
    """What a loss function may set of a model.

    Attributes:
        namespaces: the attributes of its modules, and of objects that are attributes there, such as `config`.
    """

    def __init__(self, model: nn.Module, *, may_cut: bool = True) -> None:
        """Args:
        may_cut: whether the model is cut, or may be: other micro-batches begin before one is over.
        """
        self._parameters = list(model.parameters()) if may_cut else []
        self.namespaces: list[Namespace] = []
        seen: set[int] = set()
        for module in model.modules():
            self.namespaces.append(namespace_of(module))
            of_class = vars(type(module)).values() if is_users(type(module).__module__) else ()
            own = (one for name, one in vars(module).items() if name not in _OF_EVERY_MODULE)
            for one in (*own, *of_class):
                if id(one) not in seen and has_attributes(one) and not isinstance(one, (FunctionType, nn.Module)):
                    seen.add(id(one))
                    self.namespaces.append(namespace_of(one))
        self.namespaces += [
            Namespace(module._buffers, (type(module), Tensor), f"buffer of {type(module).__name__}")
            for module in model.modules()
            if module._buffers
        ]
        self._values = [space.values for space in self.namespaces]

    def contents(self) -> list[dict[str, Any]]:
        """Returns what each namespace holds now. There may be thousands: of containers only which they are counts."""
        return [{name: one for name, one in all_.items() if name not in _OF_EVERY_MODULE} for all_ in self._values]

    @staticmethod
    def versions(of: list[dict[str, Any]]) -> dict[tuple[int, str], int]:
        """Returns how often each tensor in some contents was written to, by number of the namespace and name."""
        return {
            (number, name): one._version
            for number, values in enumerate(of)
            for name, one in values.items()
            if isinstance(one, Tensor) and not one.is_inference()
        }

    @classmethod
    def changed(
        cls, now: list[dict[str, Any]], before: list[dict[str, Any]], versions: Mapping[tuple[int, str], int]
    ) -> dict[int, set[str]]:
        """Returns the names of what was set, written to or deleted since `before`, by number of the namespace.

        Args:
            versions: those of `before`.
        """
        pairs = enumerate(zip(now, before, strict=True))
        found = {
            number: _set_since(then, one)
            for number, (one, then) in pairs
            if len(one) != len(then) or [name for name in one if name not in then or one[name] is not then[name]]
        }
        for (number, name), version in cls.versions(now).items():
            if versions.get((number, name), version) != version:
                found.setdefault(number, set()).add(name)
        return found

    @staticmethod
    def kept(now: list[dict[str, Any]], names: Mapping[int, Collection[str]]) -> list[dict[str, Any]]:
        """Returns the values that `names` had, by number, and what else is a number or text, as `Contents.kept`."""
        simple = PLAIN
        return [
            {
                name: one if type(one) in simple else _apart(one) if name in front else UNKNOWN
                for name, one in values.items()
            }
            for number, values in enumerate(now)
            for front in (names.get(number, ()),)
        ]

    def trained(self) -> list[bool]:
        """Returns which weights are trained, if that must not change."""
        with torch._C.DisableTorchFunctionSubclass():  # those that are not here tell whoever reads them, at length
            return [one.requires_grad for one in self._parameters]


def _apart(value: Any) -> Any:
    """Returns a copy of a tensor, to which others may write meanwhile."""
    return value.detach().clone() if isinstance(value, Tensor) and not value.requires_grad else value


def _set_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Returns the names of what is another object, or number or text."""

    def same(one: Any, other: Any) -> bool:
        return one is other or (type(one) is type(other) and type(one) in PLAIN and bool(one == other))

    return {name for name in now.keys() | before.keys() if not same(now.get(name, ABSENT), before.get(name, ABSENT))}


def namespace_of(one: object) -> Namespace:
    """Returns the attributes of an object that has some."""
    values = vars(one) if hasattr(one, "__dict__") else _Attributes(one)
    owner = one if type(one).__flags__ & _IS_HEAP_TYPE and not isinstance(one, nn.Module) else None
    return Namespace(values, type(one), f"attribute of {type(one).__name__}", owner)


def is_state(value: Any) -> bool:
    """Whether a value is a number, text, a tensor, an array, a container, or an object of a class of the user's."""
    return isinstance(value, (*_PLAIN, dict, set, frozenset, *_LISTS, Tensor, np.ndarray)) or is_users_object(value)


def version(value: Any) -> Version:
    """Returns what differs once `value` has changed; of what is not looked into, once it is another object."""
    left = [MOST]

    def of(one: Any) -> Any:
        left[0] -= 1
        if left[0] < (len(one) if isinstance(one, (dict, set, frozenset, *_LISTS)) else 0):
            raise OverflowError
        if isinstance(one, Tensor):
            return id(one), version_of(one)
        if isinstance(one, ContextVar):
            one = {} if one.get(None) is None else {"": one.get()}
        if isinstance(one, dict):
            return dict, tuple((key, of(each)) for key, each in one.items())
        if isinstance(one, _LISTS):
            return type(one), tuple(map(of, one))
        if isinstance(one, (set, frozenset)) and all(isinstance(each, _PLAIN) for each in one):
            return frozenset, frozenset(one)
        if isinstance(one, _PLAIN):
            return type(one), one
        if isinstance(one, np.ndarray) and one.size <= MOST and not one.dtype.hasobject:
            return id(one), one.tobytes()
        if is_others_iterator(type(one)):
            return type(one), of(position_of(one))
        return type(one), id(one)

    try:
        return of(value)
    except OverflowError:
        return _Long(id(value), operator.length_hint(value))  # an entry that is replaced is not seen


def _put_back(values: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Gives a variable the content that `value`, a copy, has; others may know its container."""
    now = values.get(name)
    if isinstance(now, ContextVar):
        now.set(value)
    elif isinstance(now, (dict, set)) and type(now) is type(value):
        now.clear()
        now.update(value)
    elif isinstance(now, list) and isinstance(value, list):
        now[:] = value
    else:
        values[name] = value


def _has_grown(before: Version, now: Version) -> bool:
    """Whether two versions are of a dictionary, or of a set, that has new entries, and else those of before."""
    if isinstance(before, _Long) or isinstance(now, _Long):
        return True
    if not (isinstance(before, tuple) and isinstance(now, tuple) and before[0] == now[0] in (dict, frozenset)):
        return False
    if before[0] is frozenset:
        return bool(before[1] <= now[1])
    entries = dict(now[1])
    return all(entries.get(key, ABSENT) == value for key, value in before[1])


def _copied(value: Any, before: Version) -> Any:
    """Returns the value with containers of its own; a tensor or an array that was written to, copied."""
    if isinstance(value, (Tensor, np.ndarray)):
        now = version(value)
        if not isinstance(before, tuple) or now[0] != before[0] or now == before:
            return value  # it was made, not written to
        return value.detach().clone() if isinstance(value, Tensor) else value.copy()
    if type(value) is tuple:
        return tuple(_copied(one, None) for one in value)
    if not isinstance(value, (dict, list, deque, set)):
        return value
    if isinstance(version(value), _Long):
        return LongContainer(value, len(value))
    made: Any = copy.copy(value)
    if isinstance(value, dict):
        for key, one in value.items():
            made[key] = _copied(one, None)
    elif not isinstance(value, set):
        for number, one in enumerate(value):
            made[number] = _copied(one, None)
    return made


_SET_IN_FRONT: dict[Kind, set[str]] = {}
"""By kind of namespace, the names that a first half has ever changed: another one may set them to what they are. What
was None or not there before may have been made once for all, and does not count."""
_NONE: frozenset[str] = frozenset()


def _set_in_front(kind: Kind, names: set[str], before: Mapping[str, Any]) -> None:
    known = {name for name in names if before.get(name) is not None}
    if known:
        _SET_IN_FRONT.setdefault(kind, set()).update(known)


class KeptAttributes:
    """What a coroutine has set when it rests is the same for the model's forward, and when it goes on, whatever others
    have set meanwhile; and behind it what those have set is there again, so that a counter counts them all.

    What is looked at: see `namespaces_of`, and the attributes of the model's modules. What the model's forward makes of
    a value that the first half has set is the micro-batch's, too. Random generators of the user's, and Python's and
    numpy's own, go on as `DrawnBehind` says.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._owners = list(owners)
        self._spaces: list[Namespace] = []
        self._kept: list[dict[str, Any]] = []
        """By namespace, values by name."""
        self._names: dict[int, set[str]] = {}
        """By number of the namespace, the names that the first half has set; where there are any."""
        self._read: list[tuple[Namespace, str]] = []
        """Attributes of objects, and variables of functions, that the first half has read, and not set."""
        self._root, self._ran = Namespace({}, object, ""), dict[CodeType, int]()
        """The model's attributes, and the code that has run in the first half."""
        self._set_of_root: set[str] = set()
        self._made: set[tuple[int, str]] = set()
        self._runs, self._held, self._comes_again = 0, list[_Held](), False
        self._at: dict[object, list[_Value]] = {}
        self._generators: list[_Generator] = []
        self._before: list[Any] = []
        self._states: list[Any] = []

    @contextlib.contextmanager
    def first_half(
        self, model: nn.Module, state: ModelState, frames: Callable[[], Iterable[FrameType]]
    ) -> Iterator[None]:
        """While the coroutine runs up to where it rests.

        Args:
            frames: returns those of the functions that have called the model, when it rests.
        Raises: SplitError when it has changed which weights are trained.
        """
        trained = state.trained()
        own = namespaces_of(self._owners, model)
        values = [value for space in own for value in space.values.values()]
        self._generators = [_LIBRARIES, *(of(one) for one in values for kind, of in _KINDS if isinstance(one, kind))]
        self._before = [one.get() for one in self._generators]
        self._spaces = [*own, *state.namespaces]
        before, before_of_model = [space.contents() for space in own], state.contents()
        versions = state.versions(before_of_model)
        with _noted([space for space in own if space.owner is not None]) as (noted, read):
            yield
        if trained != state.trained():
            raise SplitError(
                "the loss function changes requires_grad of weights (a frozen layer, an adapter that is switched on) "
                "before the model's call, and in a model that is cut other micro-batches begin meanwhile: do that "
                "before training, or set pp=1 and segments=1, where nothing is cut"
            )
        self._root, self._ran = namespace_of(model), _run_so_far(frames())
        for space, then in zip(own, before, strict=True):
            now = space.contents()
            names = now.changed(then)
            if space.owner is not None:
                names |= noted[id(space.owner)]
                self._read += [(space, name) for name in read[id(space.owner)] - names]
            else:
                _set_in_front(space.kind, names, then.values)
                last = self._ran.get(space.kind) if isinstance(space.kind, CodeType) else None
                used = _NONE if last is None else _loaded(space.kind, last)
                self._read += [(space, name) for name in used - names if name in space.values]
            if names:
                self._names[len(self._kept)] = names
            self._kept.append(now.kept(names | _SET_IN_FRONT.get(space.kind, _NONE), then))
        of_model = state.contents()
        changed = state.changed(of_model, before_of_model, versions)
        self._set_of_root = changed.get(0, set[str]())
        for number, names in changed.items():
            _set_in_front(state.namespaces[number].kind, names, before_of_model[number])
            self._names[len(own) + number] = names
        if _SET_IN_FRONT:
            kinds = [_SET_IN_FRONT.get(space.kind, _NONE) for space in state.namespaces]
            changed = {number: {*names, *changed.get(number, _NONE)} for number, names in enumerate(kinds)}
        self._kept += state.kept(of_model, changed)
        self._states = [one.get() for one in self._generators]

    def draw_on(self) -> None:
        """Python's and numpy's generators go on behind what the coroutine has drawn."""
        if self._states:
            _LIBRARIES.set(self._states[0])

    def in_the_model(self, run: object) -> contextlib.AbstractContextManager[None]:
        """While the model's forward runs. A `run` that comes again finds what it found before, and leaves nothing; so
        does one on another part of the micro-batch, which may take turns with this one."""
        if self._sets_nothing and not self._runs:
            self._at.setdefault(run, [])
            return contextlib.nullcontext()
        return self._in_the_model(run)

    @contextlib.contextmanager
    def _in_the_model(self, run: object) -> Iterator[None]:
        if not self._runs:
            self._comes_again = run in self._at
            self._held = [_Held(*one) for one in self._at.setdefault(run, self._values())]
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1
            for one in () if self._runs else self._held:
                if one.is_changed and not self._comes_again:
                    self._kept[one.number][one.name] = one.found
                    self._made.add((one.number, one.name))
                one.restore()

    @contextlib.contextmanager
    def behind_the_model(self, drawn: DrawnBehind) -> Iterator[None]:
        """While it goes on. Raises: SplitError when it changes once more what others have changed meanwhile.

        Args:
            drawn: behind other calls of the model.
        """
        states = zip(self._generators, self._before, self._states, strict=True)
        draws = [_Draws(one, drawn, *then) for one, *then in states]
        held = [_Held(*one) for one in self._values()]
        read = [(space, name, version(space.values.get(name, ABSENT))) for space, name in self._read]
        of_root = self._of_root()
        yield
        for one in draws:
            one.end()
        changed = [(space, name) for space, name, then in read if version(space.values.get(name, ABSENT)) != then]
        set_behind = [name for name, now in self._of_root().items() if of_root.get(name, ABSENT) != now]
        if set_behind:
            used = frozenset[str]().union(*(_loaded(*one, attributes=True) for one in self._ran.items()))
            changed += [(self._root, name) for name in set_behind if name in used]
        for space, name in changed:
            raise SplitError(
                f"the loss function reads '{name}' ({space.what}) in front of the model's call, and changes it "
                "behind that; in a model that is cut other micro-batches begin in between, and would find what was "
                "there before: read it behind the call, change it in a callback (on_step_end), or set pp=1 and "
                "segments=1, where nothing is cut"
            )
        for value in held:
            if not value.is_changed:
                if (value.number, value.name) not in self._made:
                    value.restore()
            elif (value.was_changed or isinstance(value.found, Iterator)) and not value.was_reset:
                raise SplitError(
                    f"the loss function sets '{value.name}' ({value.space.what}) before and behind the model's call, "
                    "and in a model that is cut other micro-batches begin in between: set it on one side only, or set "
                    "pp=1 and segments=1, where nothing is cut"
                )

    @property
    def _sets_nothing(self) -> bool:
        """As most loss functions."""
        return not _SET_IN_FRONT and not self._names

    def _of_root(self) -> dict[str, Version]:
        """Returns what differs once an attribute of the model has changed, but for those that the first half has
        set."""
        return {
            name: version(one)
            for name, one in self._root.values.items()
            if name not in _OF_EVERY_MODULE and name not in self._set_of_root
        }

    def _values(self) -> list[_Value]:
        """Returns the micro-batch's own values."""
        if self._sets_nothing:
            return []
        return [
            _Value(number, space, name, as_it_was(value))
            for number, (space, kept) in enumerate(zip(self._spaces, self._kept, strict=True))
            for name in self._names.get(number, _NONE) | _SET_IN_FRONT.get(space.kind, _NONE)
            if (value := kept.get(name, ABSENT)) is not UNKNOWN and (name in kept or name in space.values)
        ]


class _Value(NamedTuple):
    number: int
    """Of the namespace."""
    space: Namespace
    name: str
    value: Any


class _Held:
    """A value that a namespace has for a while instead of its own."""

    def __init__(self, number: int, space: Namespace, name: str, value: Any) -> None:
        self.number, self.space, self.name = number, space, name
        self._own = space.values.get(name, ABSENT)
        self._put = value, version(value)
        self._set(value)

    @property
    def found(self) -> Any:
        """What is there now."""
        return self.space.values.get(self.name, ABSENT)

    @property
    def is_changed(self) -> bool:
        """Whether it has changed since it was put there."""
        return self.found is not self._put[0] or version(self.found) != self._put[1]

    @property
    def was_changed(self) -> bool:
        """Whether others had set something else, which is not what is there now."""
        return version(self._own) not in (self._put[1], version(self.found))

    @property
    def was_reset(self) -> bool:
        """Whether what was put there, or is there now, tells nothing of what was there before, which a count or a sum
        would."""
        return _tells_nothing(self._put[0]) or _tells_nothing(self.found)

    def restore(self) -> None:
        """Puts back what was there."""
        self._set(self._own)

    def _set(self, value: Any) -> None:
        if value is not ABSENT:
            self.space.values[self.name] = value
        elif self.name in self.space.values:
            del self.space.values[self.name]


def _tells_nothing(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and not value.any()
    if isinstance(value, (bool, str)) or value is None or value is ABSENT:
        return True
    return isinstance(value, (int, float, dict, list, set, tuple, deque)) and not value


@contextlib.contextmanager
def _noted(spaces: Iterable[Namespace]) -> Iterator[tuple[dict[int, set[str]], dict[int, set[str]]]]:
    """Yields, by the number of an object, the attributes of it that are set meanwhile, also those that are set to what
    they are, and those that are read; of objects whose attributes `spaces` are."""
    written: dict[int, set[str]] = {id(space.owner): set() for space in spaces}
    read: dict[int, set[str]] = {id(space.owner): set() for space in spaces}
    undo = [
        _note(kind, method, noted)
        for kind in {type(space.owner) for space in spaces}
        for method, noted in (("__setattr__", written), ("__getattribute__", read))
    ]
    try:
        yield written, read
    finally:
        for one in undo:
            one()


def _note(kind: Any, method: str, noted: dict[int, set[str]]) -> Callable[[], None]:
    own, original = vars(kind).get(method), getattr(kind, method)

    def note(self: Any, name: str, *value: Any) -> Any:
        if id(self) in noted:
            noted[id(self)].add(name)
        return original(self, name, *value)

    def undo() -> None:
        if own is None:
            delattr(kind, method)
        else:
            setattr(kind, method, own)

    setattr(kind, method, note)
    return undo


def _are_equal(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


class _Generator(NamedTuple):
    """A random generator, and what reads its state, sets it, sets it by a number below 2^32, and compares two."""

    of: object
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    seed: Callable[[int], Any]
    same: Callable[[Any, Any], bool] = _are_equal


_LIBRARIES = _Generator(
    random,
    functools.partial(library_rng_state, whole=False),
    set_library_rng_state,
    seed_libraries,
    same_library_rng_state,
)


def _of_numpy(one: np.random.Generator) -> _Generator:
    bits = one.bit_generator

    def set_state(state: Any) -> None:
        bits.state = state

    return _Generator(one, lambda: copy.deepcopy(bits.state), set_state, lambda seed: set_state(type(bits)(seed).state))


_KINDS: tuple[tuple[type, Callable[[Any], _Generator]], ...] = (
    (random.Random, lambda one: _Generator(one, one.getstate, one.setstate, one.seed, operator.eq)),
    (np.random.RandomState, lambda one: _Generator(one, one.get_state, one.set_state, one.seed)),
    (np.random.Generator, _of_numpy),
    (torch.Generator, lambda one: _Generator(one, one.get_state, one.set_state, one.manual_seed, torch.equal)),
)


_MOST_GENERATORS = 32


class DrawnBehind:
    """What loss functions have drawn behind the calls of a model that is cut, where only a process with the last chunk
    draws, and others may have begun meanwhile. A generator goes on there as in one process: where it was when the
    function rested, or behind what was drawn there since.
    """

    def __init__(self, *, alone: bool) -> None:
        """Args:
        alone: all chunks of the model are this process's.
        """
        self.alone = alone
        self.last: dict[int, _Drawn] = {}
        """By number of the generator."""

    def note(self, of: object, rested: Any, reached: Any, is_left: bool) -> None:
        """This generator was drawn from; of many, such as one in each step, the last ones are known."""
        self.last.pop(id(of), None)
        self.last[id(of)] = _Drawn(of, rested, reached, is_left)
        if len(self.last) > _MOST_GENERATORS:
            del self.last[next(iter(self.last))]


class _Drawn(NamedTuple):
    of: object
    """The generator."""
    rested: Any
    """Where it was when the function that has drawn from it last rested."""
    reached: Any
    """Where it was after that."""
    is_left: bool
    """Whether it was left there: no other process draws, and nobody had drawn meanwhile."""


class _Draws:
    """Of one generator, while one loss function goes on."""

    def __init__(self, generator: _Generator, drawn: DrawnBehind, before: Any, rested: Any) -> None:
        """Args:
        before: where it was in front of the first half.
        rested: where it was behind that.
        """
        self._generator, self._drawn, self._before, self._rested = generator, drawn, before, rested
        self._now, start = generator.get(), rested
        last = drawn.last.get(id(generator.of))
        if last is None:
            pass
        elif generator.same(self._now, last.reached) if last.is_left else generator.same(rested, last.rested):
            start = last.reached
        elif not last.is_left:
            # Others have drawn since, and that from where it was: the same numbers must not come here once more.
            number = hashlib.blake2b(pickle.dumps(last.reached), digest_size=4).digest()
            generator.seed(int.from_bytes(number, "little"))
            start = generator.get()
        self._start, self._goes_on = start, drawn.alone and generator.same(self._now, start)
        if not generator.same(self._now, start):
            generator.set(start)

    def end(self) -> None:
        """Raises: SplitError when both halves have drawn, and others in between, or other processes will not."""
        generator, reached = self._generator, self._generator.get()
        if not generator.same(reached, self._start):
            if not self._goes_on and not generator.same(self._before, self._rested):
                raise SplitError(
                    "the loss function draws random numbers from the same generator before and behind the model's call "
                    f"({_name_of(generator.of)}), and in a model that is cut other micro-batches begin in between, and "
                    "only the last stage runs what is behind it: draw all numbers before the call, or from two "
                    "generators (random.Random(1), numpy.random.default_rng(1), torch.Generator()), or set pp=1 and "
                    "segments=1, where nothing is cut"
                )
            self._drawn.note(generator.of, self._rested, reached, self._goes_on)
        if not self._goes_on and not generator.same(reached, self._now):
            generator.set(self._now)


def _name_of(generator: object) -> str:
    return "Python's or numpy's own" if generator is random else f"a {type(generator).__name__}"
