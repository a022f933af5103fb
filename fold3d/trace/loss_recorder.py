"""LossRecorder: follows a loss function around a model's forward, and notes what it reads besides what that returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map_only

from fold3d.errors import TraceError
from fold3d.trace.arguments import ancestors
from fold3d.trace.capture import attributes, fake
from fold3d.trace.recorder import Recorder
from fold3d.trace.results.crossing import Value
from fold3d.trace.users_hooks import drop_hooks, is_ours
from fold3d.trace.values.without_values import WithoutValues

_aten = torch.ops.aten


class CalledAgainError(TraceError):
    """The loss function calls the model a second time; `guessed`: after a condition whose value was made up."""

    def __init__(self, guessed: bool) -> None:
        super().__init__("the loss function calls the model a second time")
        self.guessed = guessed


def record_loss(
    model: nn.Module, blocks: Iterable[str], call: Callable[[nn.Module, dict[str, Any]], Any], batch: Mapping[str, Any],
    truth: bool, only_loss: bool = False,
) -> tuple[tuple[str, ...], tuple[dict[Value, str], ...], bool]:  # fmt: skip
    """Runs `call(model, batch)` without the values of weights and activations, the user's hooks on the model included.

    The model loses its weights, and whoever is called may keep tensors without values: for a process that has no other
    use for them.

    Args:
        batch: a micro-batch in host memory; what is computed from it alone has values.
        truth: what a condition on values that are not there is taken to be.
        only_loss: see `Arguments`; if not, all that the model returns crosses anyway, in the recording of the call.
    Returns: why the model cannot be cut at each border (see `Recorder.borders`); what crosses each border, and where it
        is read; whether `truth` was asked for.
    Raises: CalledAgainError at the second call of the model; TraceError and whatever `call` raises.
    """
    mode = WithoutValues()
    _make_fake(model, mode)
    recorder = LossRecorder(model, blocks, mode, truth)
    before = {id(tensor) for _, tensor in attributes(model)}
    with mode, recorder:
        recorder.read_result(call(model, dict(batch)))
    for name, tensor in attributes(model):
        if id(tensor) not in before:
            recorder.note_kept(name, tensor)
    said = recorder.said()
    carried = set() if only_loss else recorder.carried
    crossings = tuple(
        {value: said[value] for crossing in border for value in crossing.values if value not in carried}
        for border in recorder.crossings()
    )
    return recorder.borders(), crossings, recorder.guessed


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    known: dict[int, Tensor] = {}
    for module in model.modules():
        drop_hooks(module, is_ours)
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for store in stores:
            for name, value in list(store.items()):
                if isinstance(value, Tensor):
                    store[name] = known.setdefault(id(value), fake(value, mode))
        if getattr(module, "gradient_checkpointing", False):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010 (no Tensor and no Module)


class LossRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A Recorder for code around the model, which may look at values: made-up ones where there are none."""

    def __init__(self, model: nn.Module, blocks: Iterable[str], mode: FakeTensorMode, truth: bool) -> None:
        names = list(blocks)
        super().__init__(model, names)
        self.guessed = False
        self.carried: set[Value] = set()
        """Results of modules of which anything is that the model returned."""
        self._truth, self._mode, self._depth, self._called = truth, mode, 0, False
        self._around = "the loss function"
        for name in ancestors(names):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._enter_model, prepend=True)
            module.register_forward_hook(self._leave_model, always_call=True)

    def _enter_model(self, *_: Any) -> None:
        if self._called and not self._depth:
            raise CalledAgainError(self.guessed)
        self._called = True
        self._depth += 1
        self._around = "the model's forward"

    def _leave_model(self, module: nn.Module, args: Any, result: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._around = "the loss function"
            leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            self.carried = {token.value for leaf in leaves for token in self._tokens.get(self._key(leaf), ())}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            raise TraceError("it talks to other processes")
        tensors = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
        if tensors and not any(isinstance(one, FakeTensor) or one.device.type != "cpu" for one in tensors):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(Tensor, self._in_host_memory, (args, kwargs))
        instead = _WITHOUT_VALUES.get(func.overloadpacket)
        if instead is not None:
            self._read({self._key(tensor) for tensor in tensors})
            with self:
                return instead(self, *args, **kwargs)
        if func.overloadpacket in _INDEXING:
            args = (args[0], [place for one in args[1] for place in self._places(one)], *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _in_own_code(self) -> bool:
        return super()._in_own_code() and self._depth > 0  # what the loss function computes, anybody may keep

    def _in_host_memory(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "cpu" else fake(tensor, self._mode)

    # -- made-up values --

    def _number(self, tensor: Tensor) -> Any:
        self.guessed = True
        return self._truth if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def _equal(self, *_: Any) -> bool:
        self.guessed = True
        return self._truth

    def _nonzero(self, tensor: Tensor) -> Tensor:
        return tensor.new_zeros((tensor.numel(), tensor.ndim), dtype=torch.long)

    def _masked_select(self, tensor: Tensor, mask: Tensor) -> Tensor:
        values, chosen = torch.broadcast_tensors(tensor, mask)  # type: ignore[no-untyped-call]
        count = chosen.numel() if isinstance(mask, FakeTensor) else int(chosen.sum())
        selected: Tensor = values.reshape(-1)[:count]
        return selected

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """Returns the index, as numbers where it is a mask; of a mask without values all places."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        if isinstance(index, FakeTensor):
            self._read({self._key(index)})
            with self:
                return list(self._nonzero(index).unbind(1))
        with _disable_current_modes():
            return list(index.nonzero().unbind(1))


_WITHOUT_VALUES: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense: LossRecorder._number,
    _aten.equal: LossRecorder._equal,
    _aten.nonzero: LossRecorder._nonzero,
    _aten.masked_select: LossRecorder._masked_select,
}
_INDEXING = frozenset({_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index})
