"""release(): letting go of the parameters that other ranks hold; MissingWeight stands for each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.errors import MissingWeightsError
from fold3d.trace.compound import holders, is_compound, let_go, mark_compound
from fold3d.trace.wrappers import whole_shape

_DEVICE = Tensor.device.__get__
_HOME: ContextVar[torch.device | None] = ContextVar("home", default=None)
"""Where the model's forward runs, while it does: its code may ask a weight where to put its inputs. Halves of a
micro-batch take turns in greenlets, and each has a context of its own."""
_IS_INSIDE: ContextVar[Callable[[], bool]] = ContextVar("is_inside", default=lambda: False)
INSTEAD = (
    'The whole model is saved by trainer.save_model() and returned by engine.state_dict()["model"]; every process must '
    "call them"
)


class _Missing(Tensor):
    """Shape and dtype are known and may be computed with; whoever asks for values is told where they are."""

    weight: str

    def call_it(self, name: str) -> None:
        """Messages name the weight `name`."""
        self.weight = name

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE and (home := _HOME.get()) is not None:
            return home
        try:
            with torch._C.DisableTorchFunctionSubclass(), _looking_at(args, kwargs):
                result = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if "meta" not in str(error).lower() or isinstance(error, MissingWeightsError):
                raise
            raise _refusal(_first_name((args, kwargs))) from error
        return _named(result, _first_name((args, kwargs)))

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal(self.weight)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self.weight)


class _Mixing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what torch computes from tensors with and without values as if those without changed nothing:
    `total.add_(weight)` and `loss += weight.pow(2).sum()` leave `total` and `loss` as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given: list[Any] = [(args, kwargs)]
        if func._schema.name.startswith("aten::_foreach"):  # each tensor of a list has its own in the other lists
            given = list(zip(*(one for one in args if isinstance(one, (list, tuple))), strict=False))
            changed = [_tensors(one)[:1] for one in given]
        else:
            changed = [_tensors(result)]
        for sources, results in zip(map(_tensors, given), changed, strict=True):
            if {tensor.is_meta for tensor in sources} == {True, False} and not all(t.is_meta for t in results):
                raise RuntimeError(f"{func} of tensors on meta and elsewhere")
        return result


def _looking_at(args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for an operation; one that looks, where it takes values too, but not in the model's forward,
    which is known to be right on what this process has."""
    given = [] if _IS_INSIDE.get()() else _tensors((args, kwargs))
    mixes = any(not tensor.is_meta for tensor in given) and not any(isinstance(t, FakeTensor) for t in given)
    return _Mixing() if mixes else contextlib.nullcontext()  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def at_home(device: torch.device, is_inside: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """While the context lasts, missing weights say that they lie on `device`, as they would in a whole model.

    `is_inside` says whether the model's own forward runs, and not the code around it, such as a loss function's.
    """
    before, inside = _HOME.set(device), _IS_INSIDE.set(is_inside)
    try:
        yield
    finally:
        _HOME.reset(before)
        _IS_INSIDE.reset(inside)


class MissingTensor(_Missing):
    """What was computed from a missing weight's shape."""


def missing(name: str) -> MissingTensor:
    """Returns a tensor that says of `name` that it is missing."""
    made: MissingTensor = torch.empty((), device="meta").as_subclass(MissingTensor)
    made.call_it(name)
    return made


class MissingWeight(_Missing, nn.Parameter):
    """A parameter of the shape (the whole one's) and dtype of `parameter`, without storage, gradient or values.

    Attributes:
        weight: its name in the model, for messages.
        trainable: whether it is trained where it lies.
        stood_before: the number (`id`) of the parameter in whose place it is, which an optimizer may still have.
    """

    trainable: bool
    stood_before: int

    def __new__(cls, parameter: nn.Parameter, name: str) -> MissingWeight:
        whole = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")
        compound = is_compound(parameter)
        like = parameter.detach().to("meta") if whole.shape == parameter.shape and not compound else whole
        made: MissingWeight = Tensor._make_subclass(cls, like, False)
        if compound:
            mark_compound(made)
        made.call_it(name)
        made.stood_before = getattr(parameter, "stood_before", id(parameter))
        made.trainable = getattr(parameter, "trainable", parameter.requires_grad)
        return made

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        """`parameter` is only looked at."""


def _named(result: Any, name: str) -> Any:
    """Returns `result` with the tensors in it marked as missing."""

    def mark(tensor: Tensor) -> Tensor:
        if isinstance(tensor, _Missing) or not tensor.is_meta:
            return tensor
        marked = tensor.as_subclass(MissingTensor)
        marked.call_it(name)
        return marked

    return mark(result) if isinstance(result, Tensor) else tree_map_only(Tensor, mark, result)


def _first_name(value: Any) -> str:
    names: list[str] = []
    tree_map_only(_Missing, lambda tensor: names.append(tensor.weight), value)
    return names[0] if names else "a weight"


def _refusal(name: str) -> MissingWeightsError:
    return MissingWeightsError(
        f"{name} lies in another process, this one has its shape but no values, so it can neither compute with the "
        f"whole model nor copy or save it. {INSTEAD}"
    )


def release(model: nn.Module, keep: set[str]) -> None:
    """Moves every parameter whose names are all outside `keep` to the meta device, in place, and frees its
    memory.

    The model, its modules and all names stay; a released parameter is a `MissingWeight`. Tied parameters stay tied,
    buffers stay. With a compound parameter goes what its module has of it. The memory is free once nobody else (an
    optimizer, for one) holds the old parameter.
    """
    compound = [module for _, module in holders(model)]
    for parameter, names in parameter_holders(model):
        if keep.isdisjoint(names) and not isinstance(parameter, MissingWeight):
            replace_parameter(model, names, MissingWeight(parameter, names[0]))
    for module in compound:
        if all(isinstance(one, MissingWeight) for one in module._parameters.values() if one is not None):
            let_go(module)


def is_released(parameter: nn.Parameter) -> bool:
    """Returns whether `release` took the parameter's storage."""
    return isinstance(parameter, MissingWeight)


def parameter_holders(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Returns every parameter with all its names, in the model's order."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(found.values())


def replace_parameter(model: nn.Module, names: Sequence[str], parameter: torch.nn.Parameter) -> None:
    """Puts `parameter` in the place of the one that has these names."""
    for name in names:
        holder, _, attribute = name.rpartition(".")
        # setattr and not _parameters[...]: recurrent modules keep a second list of their weights
        setattr(model.get_submodule(holder), attribute, parameter)
