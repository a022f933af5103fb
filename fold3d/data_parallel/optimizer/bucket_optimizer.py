"""BucketOptimizer: steps the tensors of one bucket, with the settings of the moment when it was asked to;
step_by_kernel(): a step of AdamW by fold3d's kernel, clipping and update in one pass.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fold3d.data_parallel.bucket import Piece
from fold3d.data_parallel.gradients import Factor, multiply
from fold3d.data_parallel.optimizer.host_copies import HostCopies
from fold3d.data_parallel.optimizer.host_memory import host_memory, settings_on_host, to_host
from fold3d.profile.optimizer import has_fused_step
from fold3d.trace.wrappers import is_ours

_UPDATE_BEFORE = "update_before"


@torch.no_grad()
def step_by_kernel(twin: Optimizer, gradients: Mapping[Tensor, Tensor], scale: Factor) -> None:
    """Does what `twin.step()` does with these gradients times `scale`, in fp32 (fp64 of fp64 weights).

    Where weights are bfloat16 that rounds less often than torch does: fp32 gradients are not rounded before.

    Args:
        twin: one that `separable.check_steps` lets pass.
        gradients: parameter -> gradient, of its shape; parameters without one are skipped. They stay as they are.
    """
    factor = scale.to(torch.float64) if isinstance(scale, Tensor) else torch.tensor(scale, dtype=torch.float64)
    for group in twin.param_groups:
        alike: dict[tuple[torch.dtype, ...], list[tuple[Tensor, ...]]] = {}
        for weight in group["params"]:
            gradient = gradients.get(weight)
            if gradient is None:
                continue
            state = _state_of(twin, weight, group)
            state["step"] += 1
            arrays = (weight, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"])
            alike.setdefault(tuple(one.dtype for one in arrays[:3]), []).append(arrays)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        for members in alike.values():
            weights, given, means, squares, steps = (list(column) for column in zip(*members, strict=True))
            torch.ops.fold3d.adamw_(
                weights,
                _laid_out(given, weights),
                _kept(means, weights),
                _kept(squares, weights),
                steps,
                [],
                factor,
                float(group["lr"]),
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
            )


def _state_of(twin: Optimizer, weight: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameter's state, begun as torch begins it."""
    state: dict[str, Any] = twin.state[weight]
    if not state:
        on_device = group.get("fused") or group.get("capturable")
        kind = torch.float64 if torch.get_default_dtype() == torch.float64 and not on_device else torch.float32
        state["step"] = torch.zeros((), dtype=kind, device=weight.device if on_device else "cpu")
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return state


def _laid_out(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors as they are, or copies of those that lie otherwise than their weights."""
    return [
        one if one.stride() == weight.stride() else torch.empty_like(weight, dtype=one.dtype).copy_(one)
        for one, weight in zip(tensors, weights, strict=True)
    ]


def _kept(moments: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Returns the moments, whose memory is made to lie as their weights' does."""
    for moment, weight in zip(moments, weights, strict=True):
        if moment.stride() != weight.stride():
            moment.data = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)
    return list(moments)


@dataclass(frozen=True, slots=True)
class Settings:
    """What `optimizer.step()` was called with: the settings of its groups, and how gradients are scaled for it."""

    groups: tuple[Mapping[str, Any], ...]
    coefficient: Factor
    """Clipping; the number 1.0 changes nothing."""

    @classmethod
    def of(cls, optimizer: Optimizer, coefficient: Factor) -> Settings:
        """Returns the settings as they are now; a schedule may change them before a bucket is updated."""
        kept = ({k: _copy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
        return cls(tuple(kept), coefficient)

    def saved(self) -> list[dict[str, Any]]:
        """Returns what JSON can hold of the groups' settings, without losing a bit."""
        return [
            {key: _as_json(value) for key, value in group.items() if _is_plain(_as_json(value))}
            for group in self.groups
        ]

    @classmethod
    def of_saved(cls, optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> Settings:
        """Returns the settings that `saved` returned, in the types that the optimizer has now; others are as now."""
        now = cls.of(optimizer, 1.0)
        groups = (
            {**group, **{key: _like(value, group.get(key)) for key, value in kept.items()}}
            for group, kept in zip(now.groups, saved, strict=True)
        )
        return replace(now, groups=tuple(groups))


class BucketOptimizer:
    """A twin of the user's optimizer over some tensors, in the groups of the parameters that they are part of."""

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: Sequence[tuple[Piece, Tensor]],
        *,
        sharded: bool,
        copies: HostCopies | None = None,
        kernel: bool = False,
        feeds_back: bool = False,
    ):
        """Args:
        tensors: what to step; each stands for its piece's parameter. Those of parameters that the optimizer does not
            have are left alone.
        sharded: the twin keeps a state of its own; else the tensors are the parameters, and the state is the
            optimizer's.
        copies: of those of `tensors` that the optimizer has, in host memory, where they are stepped and the state lies.
        kernel: fold3d's kernel steps in the optimizer's place, see `check_steps`.
        feeds_back: with u(t) for what the optimizer's step number t subtracts from a tensor, 2 u(t) - u(t-1) is
            subtracted, so that what a late gradient has missed of the update before is made up for. u(t-1) is in the
            state, under "update_before".
        """
        self._optimizer = optimizer
        self._sharded = sharded
        self._copies, self._kernel, self._feeds_back = copies, kernel, feeds_back
        self._scale: Factor = 1.0  # what is left of the settings' coefficient
        number = {id(p): k for k, group in enumerate(optimizer.param_groups) for p in group["params"]}
        device = [(piece, tensor) for piece, tensor in tensors if id(piece.parameter) in number]
        self.tensors = device if copies is None else copies.weights
        """What the twin steps."""
        self._dtypes = {piece.index: tensor.dtype for piece, tensor in self.tensors}
        self._gradients: Mapping[int, Tensor] | None = None
        is_away = copies is not None and any(tensor.device.type != "cpu" for _, tensor in device)
        self._fused = is_away and has_fused_step(optimizer, device[0][1].dtype)
        self._settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = self._on_host if is_away else dict
        groups: list[dict[str, Any]] = [{**self._settings(group), "params": []} for group in optimizer.param_groups]
        for piece, tensor in self.tensors:
            groups[number[id(piece.parameter)]]["params"].append(tensor)
        self.twin = twin_of(optimizer, groups)
        # The state is the optimizer's, by parameter, and the twin's, by tensor.
        self._lends = not sharded and (
            copies is not None or any(piece.parameter is not tensor for piece, tensor in self.tensors)
        )

    def prepare(self, gradients: Mapping[int, Tensor], settings: Settings) -> None:
        """Takes the gradients of the next `step`; where the optimizer steps on the host they set out for it.

        Args:
            gradients: index of the parameter in its bucket -> gradient of the tensor; those that are missing are
                skipped, as torch's optimizers skip parameters without gradient. Scaled, in place or as they are read.
        """
        if self._kernel and self._copies is None:
            self._gradients, self._scale = (
                {k: gradients[k] for k in self._dtypes if k in gradients},
                settings.coefficient,
            )
            return
        multiply(list(gradients.values()), settings.coefficient)
        own = {index: gradients[index].to(dtype) for index, dtype in self._dtypes.items() if index in gradients}
        self._gradients = own if self._copies is None else self._copies.bring(own)

    def step(
        self, gradients: Mapping[int, Tensor], settings: Settings, ahead: Callable[[], None] | None = None
    ) -> None:
        """Updates the tensors.

        Args:
            gradients: as in `prepare`, which may have been called with them already.
            ahead: `prepare` of what is stepped next.
        """
        if self._gradients is None:
            self.prepare(gradients, settings)
        given, self._gradients = self._gradients, None
        assert given is not None
        if ahead is not None:
            ahead()
        if self._copies is not None:
            self._copies.arrive()
        self._take_state()
        for group, kept in zip(self.twin.param_groups, settings.groups, strict=True):
            group.update(self._settings(kept))
        with self.memory():
            if self._feeds_back:
                self._step_feeding_back(given)
            else:
                self._step_twin(given)
        if self._copies is not None:
            self._copies.send(given)
        if self._lends:
            self._give_state()

    def _step_twin(self, gradients: Mapping[int, Tensor]) -> None:
        if self._kernel:
            found = {tensor: gradients[piece.index] for piece, tensor in self.tensors if piece.index in gradients}
            step_by_kernel(self.twin, found, self._scale)
            return
        for piece, tensor in self.tensors:
            tensor.grad = gradients.get(piece.index)
        self.twin.step()
        for _, tensor in self.tensors:
            tensor.grad = None

    @torch.no_grad()
    def _step_feeding_back(self, gradients: Mapping[int, Tensor]) -> None:
        stepped = [tensor for piece, tensor in self.tensors if piece.index in gradients]
        updates = [tensor.detach().clone() for tensor in stepped]
        self._step_twin(gradients)
        for tensor, update in zip(stepped, updates, strict=True):
            update.sub_(tensor)
            state = self.twin.state[tensor]
            before = state.get(_UPDATE_BEFORE)
            tensor.sub_(update if before is None else update - before)
            state[_UPDATE_BEFORE] = update

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """Attributes of the user's optimizer, plain ones, were set between two steps."""
        vars(self.twin).update({name: copy.copy(value) for name, value in values.items()})

    def memory(self) -> AbstractContextManager[None]:
        """Returns the context in which tensors of the state are made."""
        return contextlib.nullcontext() if self._copies is None else host_memory()

    def own(self, value: Any) -> Any:
        """Returns a value of the state as the twin keeps it: in host memory where it steps there."""
        return value if self._copies is None else to_host(value)

    def own_state(self) -> None:
        """Brings the optimizer's state of these parameters to where the twin keeps it; of whole parameters."""
        for piece, _ in self.tensors:
            state = self._optimizer.state.get(piece.parameter)
            if state is not None:
                for key, value in state.items():
                    state[key] = self.own(value)

    def load(self, read: Callable[[Piece], dict[str, Any] | None]) -> None:
        """Loads the state of each piece of which `read` returns any, as the optimizer would. For pieces that this one
        steps alone."""
        self.twin.state.clear()
        numbers = {id(tensor): number for number, (_, tensor) in enumerate(self.tensors)}
        groups = [{**one, "params": [numbers[id(p)] for p in one["params"]]} for one in self.twin.param_groups]
        with self.memory():
            found = {number: read(piece) for number, (piece, _) in enumerate(self.tensors)}
            state = {number: values for number, values in found.items() if values is not None}
            before = self.twin.param_groups
            for name in _LOAD_HOOKS:
                setattr(self.twin, name, _of_others(getattr(self._optimizer, name)))
            self.twin.load_state_dict({"state": state, "param_groups": groups})
            self.twin.param_groups = before
            loaded = dict(self.twin.state)
            for tensor, values in loaded.items():
                self.twin.state[tensor] = {key: self.own(value) for key, value in values.items()}

    def _take_state(self) -> None:
        if self._sharded:
            return
        if not self._lends:
            self.twin.state = self._optimizer.state
            return
        for piece, tensor in self.tensors:
            state = self._optimizer.state.get(piece.parameter)
            if state is None:
                self.twin.state.pop(tensor, None)
            else:
                self.twin.state[tensor] = state

    def _give_state(self) -> None:
        for piece, tensor in self.tensors:
            if tensor in self.twin.state:
                self._optimizer.state[piece.parameter] = self.twin.state[tensor]

    def _on_host(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return settings_on_host(settings, fused=self._fused)


_LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def _of_others(hooks: Mapping[int, Callable[..., Any]]) -> OrderedDict[int, Any]:
    return OrderedDict((number, hook) for number, hook in hooks.items() if not is_ours(hook))


def loads_by_itself(optimizer: Optimizer) -> bool:
    """Whether code of others' takes part when this optimizer loads a state, such as one that keeps its dtypes."""
    methods = ("load_state_dict", "_process_value_according_to_param_policy")
    overrides = any(getattr(type(optimizer), name) is not getattr(Optimizer, name) for name in methods)
    return overrides or any(_of_others(getattr(optimizer, name)) for name in _LOAD_HOOKS)


TWINS: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""All that `twin_of` has returned."""


def twin_of(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns an optimizer of the same class over other tensors, without a constructor's checks and conversions."""
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    # These in the instance are wrappers around the original's, by a learning rate schedule and by OptimizerHooks.
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name not in ("step", "train", "eval")})
    twin.state = defaultdict(dict)
    twin.defaults = dict(optimizer.defaults)  # who changes them means later steps
    twin.param_groups = groups
    manager = getattr(twin, "mng", None)
    if hasattr(manager, "index2config"):  # bitsandbytes': settings of single parameters, by their place in the groups
        twin.mng = copy.copy(manager)  # type: ignore[attr-defined]
        twin.mng.index2config = {}  # type: ignore[attr-defined]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    TWINS.add(twin)
    return twin


def _as_json(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _like(value: Any, now: Any) -> Any:
    """Returns a value from JSON as one of the type of `now`."""
    if isinstance(now, Tensor):
        return torch.full_like(now, value)
    return tuple(value) if isinstance(now, tuple) else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
