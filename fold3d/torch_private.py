"""What fold3d takes from torch that torch does not promise to keep: one function for each, and a test of it
(tests/test_torch_private.py) that says which release of torch has changed it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _autograd
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils.checkpoint import _CheckpointFrame, detach_variable

T = TypeVar("T")


def storage_key(tensor: Tensor) -> int:
    """Returns a number that tensors have in common which share memory; its own of a sparse one, whose parts have the
    memory. When that is freed, another may get the number."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was written to; 0 of one of inference mode, which does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


class StorageLabels(Generic[T]):
    """A label for each memory, which all tensors that share it have, for as long as it lives: torch keeps one object of
    it. A sparse tensor has none, as its parts have the memory."""

    def __init__(self) -> None:
        self._labels: weakref.WeakKeyDictionary[torch.UntypedStorage, T] = weakref.WeakKeyDictionary()

    def __setitem__(self, tensor: Tensor, label: T) -> None:
        if tensor.layout == torch.strided:
            self._labels[tensor.untyped_storage()] = label

    def get(self, tensor: Tensor) -> T | None:
        """Returns the label; None where there is none."""
        return self._labels.get(tensor.untyped_storage()) if tensor.layout == torch.strided else None

    def values(self) -> list[T]:
        """Returns the labels of all that lives."""
        return list(self._labels.values())


def ask_for_norms(ask: Callable[[list[Tensor] | None, list[Tensor], float], Tensor | None]) -> None:
    """Has torch.nn.utils' `clip_grad_norm_`, also where it was imported before, and `get_total_norm` take what
    `ask(parameters, gradients, norm_type)` returns for the norm; None: they compute it. `get_total_norm` knows of no
    parameters."""
    own = clip_grad._get_total_norm

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Any:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        caller = sys._getframe(1)
        clips = caller.f_code.co_name == "clip_grad_norm_" and caller.f_globals is vars(clip_grad)
        found = ask(caller.f_locals["parameters"] if clips else None, gradients, float(norm_type))
        if found is None:
            return own(gradients, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not bool(found.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        return found

    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm


def in_backward() -> bool:
    """Returns whether the caller runs within a backward, such as where an activation checkpoint runs again."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def changing_stores(change: Callable[[Any, int, int], Any]) -> Iterator[None]:
    """Within it `init_process_group` takes `change(store, rank, ranks)` in place of each store that it finds by an
    address or a launcher's variables."""
    module: Any = dist.distributed_c10d
    usual = module.rendezvous

    def rendezvous(*args: Any, **named: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, ranks in usual(*args, **named):
            yield change(store, rank, ranks), rank, ranks

    module.rendezvous = rendezvous
    try:
        yield
    finally:
        module.rendezvous = usual


# -- activation checkpoints --


class Checkpoint(NamedTuple):
    """The innermost torch.utils.checkpoint, not a reentrant one, in which code runs."""

    frame: Any
    """The same in the forward and when backward runs the code again; it can be referred to weakly."""
    run: Any
    """Of this run of the code alone; likewise."""
    again: bool
    """Whether backward runs it again."""


def checkpoint_around() -> Checkpoint | None:
    """Returns the checkpoint in which the caller runs; None outside of one.

    torch has no public way to ask for it. Its frame is in the closure of the hook that the checkpoint installs: itself
    in the forward, a weak reference when backward runs the code again.
    """
    pack = saving_hook()
    if pack is None:
        return None
    for cell in getattr(inspect.unwrap(pack), "__closure__", None) or ():
        content = cell.cell_contents
        again = isinstance(content, weakref.ref)
        frame = content() if again else content
        if isinstance(frame, _CheckpointFrame):
            return Checkpoint(frame, pack, again)
    return None


def saving_hook() -> Any:
    """Returns the hook that packs what graphs save here, which is the same object throughout a checkpoint; None where
    there is none."""
    hooks: Any = _autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def run_again_within(frame: Any, around: Callable[[], AbstractContextManager[Any]]) -> None:
    """Has backward run the code of a checkpoint within `around()`: torch restores generators and autocast for it, but
    no function modes.

    Args:
        frame: a Checkpoint's.
    """
    again = frame.recompute_fn

    def recompute(*args: Any, **kwargs: Any) -> Any:
        with around():
            return again(*args, **kwargs)

    frame.recompute_fn = recompute


def functions_around() -> Iterator[type]:
    """Yields the torch.autograd.Functions in whose forwards the caller's caller runs, the innermost first. Slow: it
    walks the stack."""
    code = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["cls"]
        frame = frame.f_back


def running_modules() -> Iterator[int]:
    """Yields the ids of the modules in whose calls the caller's caller runs, the innermost first. Slow, likewise."""
    code = torch.nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code:
            yield id(frame.f_locals.get("self"))
        frame = frame.f_back


def is_called_by_detach_variable(depth: int) -> bool:
    """Returns whether the function `depth` calls above this one is that by which a reentrant checkpoint detaches what
    it is given."""
    return sys._getframe(depth).f_code is detach_variable.__code__


# -- version counters --


def set_version_counts(counts: Mapping[Tensor, int]) -> None:
    """Sets the numbers of writes by which a backward notices that a tensor was written since its graph saved it."""
    torch._C._autograd._unsafe_set_version_counter(tuple(counts), tuple(counts.values()))


# -- the order of a backward --


def place_in_backward(node: Any) -> int:
    """Returns the number of a graph's node: of those that are ready, autograd runs the highest first."""
    return int(node._sequence_nr())


def set_place_in_backward(node: Any, number: int) -> None:
    """Gives a node another number."""
    node._set_sequence_nr(number)


# -- modes of the thread --


class Depth(NamedTuple):
    """How far the thread's stacks of modes reach."""

    functions: int = 0
    dispatches: int = 0
    hooks: Any = None
    """The topmost hooks for saved tensors."""

    @classmethod
    def now(cls) -> Depth:
        """Returns that of this thread as it is."""
        hooks = _autograd._top_saved_tensors_default_hooks(True)
        return cls(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), hooks)


class Modes(NamedTuple):
    """Taken off the thread, the topmost first."""

    hooks: list[Any]
    functions: list[Any]
    dispatches: list[Any]


def take_modes_off(above: Depth) -> Modes:
    """Takes hooks for saved tensors, function and dispatch modes off the thread that are above; returns them."""
    hooks: list[Any] = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) is not None and top != above.hooks:
        hooks.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    functions = [
        torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack() - above.functions)
    ]
    dispatches = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack() - above.dispatches)]
    return Modes(hooks, functions, dispatches)


def put_modes_on(modes: Modes) -> None:
    """Puts on top of the thread's modes what was taken off."""
    for hooks in reversed(modes.hooks):
        _autograd._push_saved_tensors_default_hooks(*hooks)
    for mode in reversed(modes.functions):
        torch._C._push_on_torch_function_stack(mode)
    for mode in reversed(modes.dispatches):
        _push_mode(mode)


def follows_operations() -> bool:
    """Returns whether any mode looks at every operation of this thread, as a recording does."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


# -- compiled code, calls of modules --


def try_latest_code_first(on: bool) -> None:
    """Whether a compiled function tries the code that ran last before that which was compiled first, as by default."""
    torch._C._dynamo.eval_frame._set_lru_cache(on)  # type: ignore[attr-defined]


def wrap_call(module: torch.nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces on one module what runs its forward with its hooks by what `around` makes of that."""
    module._call_impl = around(module._call_impl)  # type: ignore[method-assign]


def unwrap_call(module: torch.nn.Module) -> None:
    """Takes off what `wrap_call` has put on a module or on that of which it is a copy."""
    vars(module).pop("_call_impl", None)
