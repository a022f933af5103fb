"""Bucket: gradients of consecutive layers, flat, summed over the replicas as one; PendingGradient: what `.grad` holds
while they are not in it, so that nobody works on nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fold3d.errors import ConfigError
from fold3d.placement.bucket_layout import BucketSpec
from fold3d.torch_private import in_backward

_ADD = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)
_ZERO = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)


class PendingGradient(Tensor):
    """Has the shape, dtype and device of a parameter's gradient, and no values: reading or writing them raises.

    Attributes:
        taken: the optimizer has stepped; zeroing changes nothing any more, and is let pass.
    """

    of_parameter: str
    taken: bool

    @staticmethod
    def of(name: str, parameter: Parameter) -> PendingGradient:
        """Returns one for a parameter."""
        gradient: PendingGradient = torch.Tensor._make_wrapper_subclass(
            PendingGradient,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            requires_grad=False,
        )
        gradient.of_parameter, gradient.taken = name, False
        return gradient

    def mark(self, *, taken: bool) -> None:
        """Notes whether the optimizer has stepped."""
        self.taken = taken

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PendingGradient))
        if func in _ADD and in_backward():
            return first  # a backward pass that adds to it; the hook behind it (Reducer) says what is wrong with that
        if func is torch.ops.aten.detach.default:
            return first
        if first.taken and func in _ZERO:
            return first if func is _ZERO[0] else None
        raise first.error()

    def error(self) -> ConfigError:
        """Returns what is raised for whoever wants the values."""
        if self.taken:
            why = "optimizer.step() has taken the summed gradients"
        else:
            why = "the summed gradients are not in .grad, where an attached optimizer takes them from elsewhere"
        return ConfigError(
            f"{self.of_parameter}.grad was read or changed, but {why}; to see and change them pass "
            "reads_gradients=True to Engine.run; with fold3d.Trainer read them in on_pre_optimizer_step of a callback "
            "or in an overridden training_step, which it knows of before training begins. For the norm alone there is "
            "grad_norm, for clipping clip_grad_norm"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Raises."""
        raise self.error()

    def tolist(self) -> Any:
        """Raises."""
        raise self.error()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PendingGradient({self.of_parameter!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


RUNS_ANEW = "engine.run begins a step with gradients of zero, and nobody has taken those of the run before"


def check_dropped(optimizer: Optimizer, why: str = RUNS_ANEW) -> None:
    """Raises ConfigError where gradients would be dropped: a parameter of the optimizer's has one that is not zero.

    Args:
        why: they would.
    """
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    if any(one is not None and (isinstance(one, PendingGradient) or bool(one.norm())) for one in gradients):
        raise ConfigError(
            f"{why}: call optimizer.step(), or optimizer.zero_grad() to drop them. Micro-batches of one step all go "
            "into one run"
        )


_ALIGN = 64
"""Parameters and shards begin at multiples of so many elements: two AVX-512 registers of 16-bit numbers, what torch's
vectorised loops take at a time. What is left over at a loop's end is rounded differently where parameters have 16 bits,
so a shard may end within a parameter only where a loop over the whole parameter would not."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one shard of a bucket; positions count elements."""

    name: str
    parameter: Parameter
    index: int
    """Of the parameter in its bucket."""
    start: int
    """First element in the flat bucket."""
    stop: int
    offset: int
    """First element in the parameter, flattened as it lies in memory."""

    @classmethod
    def whole(cls, name: str, parameter: Parameter) -> Piece:
        """Returns that of a shard which is the parameter."""
        return cls(name, parameter, 0, 0, parameter.numel(), 0)

    def of(self, flat: Tensor) -> Tensor:
        """Returns the piece's part of its bucket's flat tensor; a number without dimensions stays one."""
        part = flat[self.start : self.stop]
        return part if self.parameter.ndim else part.view(())

    def part_of(self, value: Tensor) -> Tensor:
        """Returns the piece's part, flat, of what has a value for each element of the parameter, or expands to that."""
        flat = flattened(value.expand(self.parameter.shape), self.parameter)
        return flat[self.offset : self.offset + self.stop - self.start]


class Bucket:
    """Main gradients of some parameters of one chunk, laid out flat: fp32, or the parameters' dtype if that is wider.

    The flat tensor has as many equal shards as there are replicas; replica r owns shard r after the reduce-scatter. A
    parameter in the main gradients' dtype accumulates straight into its view, another one's gradients are added by
    `accumulate`.

    With two `sets` of gradients a step's take up gradients while those of the step before are summed, see `turn`.

    Attributes:
        number: position in the order of the forward pass, the same on all replicas.
        key: of the bucket and its set, for who moves them.
        gradients: [n], n a multiple of the number of replicas; what lies behind a parameter is padding.
        weights: [n], the parameters' own memory, once `flatten_parameters` was called; else None.
        versions: [n] each, where weights have several that take turns: `weights` is the newest.
        views: per parameter, its gradient in the flat tensor.
        used: per parameter, whether any micro-batch of this step gave it a gradient.
    """

    def __init__(
        self,
        number: int,
        spec: BucketSpec,
        parameters: Mapping[str, Parameter],
        replicas: int,
        rank: int,
        sets: int = 1,
    ):
        self.number = number
        self.keys = range(sets * number, sets * (number + 1))
        self.spec = spec
        self.names = spec.names
        self.parameters = [parameters[name] for name in spec.names]
        first = self.parameters[0]
        sizes = [_round_up(parameter.numel(), _ALIGN) for parameter in self.parameters]
        self._starts = [0, *itertools.accumulate(sizes)]
        total = _round_up(self._starts[-1], replicas * _ALIGN)
        dtype = functools.reduce(torch.promote_types, (p.dtype for p in self.parameters), torch.float32)
        if dtype.is_complex:
            name = next(name for name, one in zip(self.names, self.parameters, strict=True) if one.is_complex())
            raise ConfigError(
                f"{name} is {dtype}, and replicas, like late gradients, add up real numbers only: keep it as real "
                "numbers (torch.view_as_real), and make the complex ones in the forward, or set dp=1"
            )
        self.weights: Tensor | None = None
        self.versions: list[Tensor] = []
        self._pending: list[PendingGradient] = []
        self._writes: list[int] = []  # how often each weight had been written to when its update was left to later
        self._others: list[tuple[int, Tensor, list[Tensor], list[bool]]] = []
        for key in reversed(self.keys):
            flat = torch.zeros(total, dtype=dtype, device=first.device)
            self._others.append((key, flat, self.views_of(flat), [False] * len(sizes)))
        self.key, self.gradients, self.views, self.used = self._others.pop()
        width = total // replicas
        self.shard = slice(rank * width, (rank + 1) * width)
        self.pieces = list(self._pieces_in(self.shard))

    @property
    def all_pieces(self) -> list[Piece]:
        """The parameters whole."""
        return list(self._pieces_in(slice(0, self.gradients.numel())))

    def _pieces_in(self, shard: slice) -> Iterator[Piece]:
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            begin, end = self._starts[index], self._starts[index] + parameter.numel()
            start, stop = max(begin, shard.start), min(end, shard.stop)
            if start < stop:
                yield Piece(name, parameter, index, start, stop, start - begin)

    def turn(self) -> None:
        """Exchanges the set of gradients with the other one; each keeps what it holds."""
        self._others.append((self.key, self.gradients, self.views, self.used))
        self.key, self.gradients, self.views, self.used = self._others.pop(0)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Returns the parts of a flat tensor that are the parameters', in their shapes."""
        return [
            laid_out(flat[start : start + parameter.numel()], parameter)
            for start, parameter in zip(self._starts, self.parameters, strict=False)
        ]

    def flatten_parameters(self) -> None:
        """Moves the parameters into one flat tensor, so that an all-gather can write them in place.

        Called again when they have other memory: they move back, and what holds parts of the flat tensor stays right.
        """
        if self.weights is None:
            dtypes = {parameter.dtype for parameter in self.parameters}
            assert len(dtypes) == 1, "a bucket holds parameters of one dtype"
            self.weights = torch.zeros(self.gradients.numel(), dtype=dtypes.pop(), device=self.gradients.device)
        for parameter, view in zip(self.parameters, self.views_of(self.weights), strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def add_versions(self, count: int) -> list[Tensor]:
        """Weights have so many versions from now on, alike at first. Returns the flat tensors, the newest first."""
        self.flatten_parameters()
        assert self.weights is not None
        self.versions = [self.weights, *(self.weights.clone() for _ in range(count - 1))]
        return self.versions

    def use_version(self, number: int) -> None:
        """This one of the `versions` is the newest."""
        self.weights = self.versions[number]

    def holds(self, parameter: Parameter) -> bool:
        """Whether the parameter's memory is in `weights`, or in another of the `versions`."""
        assert self.weights is not None
        flats = self.versions or [self.weights]
        return any(flat.data_ptr() <= parameter.data_ptr() < flat.data_ptr() + flat.nbytes for flat in flats)

    def attach(self) -> None:
        """Lets autograd accumulate into the flat gradients from now on."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view if view.dtype == parameter.dtype else None

    def accumulate(self, index: int) -> None:
        """A backward pass gave parameter `index` a gradient, which hooks of the user's may have replaced or dropped."""
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        if view.dtype != parameter.dtype:  # `.grad` has that of this pass alone
            self.used[index] = self.used[index] or gradient is not None
            if gradient is not None:
                view.add_(gradient)
            parameter.grad = None
        else:  # `.grad` has the sum so far
            self.used[index] = gradient is not None
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient)
            parameter.grad = view

    def check_attached(self) -> None:
        """Raises ConfigError where somebody has replaced a gradient behind `accumulate`."""
        for name, parameter, view in zip(self.names, self.parameters, self.views, strict=True):
            if view.dtype == parameter.dtype and parameter.grad is not view:
                raise ConfigError(
                    f"{name}.grad was replaced after the backward had been added up, such as by a hook "
                    "(register_post_accumulate_grad_hook) that was registered later than the engine's: change "
                    "gradients in place, or register it before the engine is built"
                )

    def note_writes(self) -> None:
        """From now until `check_unwritten` the weights are not what they will be."""
        self._writes = [parameter._version for parameter in self.parameters]

    def check_unwritten(self) -> None:
        """Raises ConfigError where somebody has written to a weight since `note_writes`."""
        writes, self._writes = self._writes, []
        for name, parameter, then in zip(self.names, self.parameters, writes, strict=False):
            if parameter._version != then:
                raise ConfigError(
                    f"{name} was written to behind optimizer.step(), and its update comes only before its next "
                    "forward: call engine.flush() before weights or the optimizer's state are changed"
                )

    def set_used(self, used: Iterable[Any]) -> None:
        """Whether any micro-batch gave each parameter a gradient, here or elsewhere."""
        self.used = [bool(one) for one in used]

    def clear(self) -> None:
        """Begins the next step's sum at zero."""
        self.gradients.zero_()
        self.used = [False] * len(self.used)

    def expose(self) -> None:
        """Sets every `.grad` to the gradients as they are, None where nobody used the parameter."""
        for parameter, view, used in zip(self.parameters, self.views, self.used, strict=True):
            parameter.grad = (view if view.dtype == parameter.dtype else view.to(parameter.dtype)) if used else None

    def take_back(self) -> None:
        """Makes what `.grad` holds now, after `expose`, the gradients: whatever was changed, set or taken away."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient, was_used = parameter.grad, self.used[index]
            self.used[index] = gradient is not None
            if gradient is None:
                view.zero_()
            elif gradient is not view and not (was_used and torch.equal(gradient, view.to(gradient.dtype))):
                view.copy_(gradient)  # else it is the same, rounded to the parameter's dtype

    def detach(self) -> None:
        """Takes the gradients off the parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def veil(self, *, taken: bool) -> None:
        """Lets whoever reads or changes `.grad` know that the gradients are not there, or no more (`taken`)."""
        if not self._pending:
            self._pending = [PendingGradient.of(*both) for both in zip(self.names, self.parameters, strict=True)]
        with torch._C.DisableTorchFunctionSubclass():  # of parameters that wait for their update
            for parameter, pending in zip(self.parameters, self._pending, strict=True):
                pending.mark(taken=taken)
                parameter.grad = pending

    def check_veiled(self) -> None:
        """Raises ConfigError when somebody meant to give the optimizer gradients of their own, since `veil`."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if not isinstance(parameter.grad, PendingGradient):
                what = "taken away" if parameter.grad is None else "set"
                raise ConfigError(
                    f"{name}.grad was {what} between run and optimizer.step(), but the summed gradients are not in "
                    ".grad; clip with engine.clip_grad_norm, or pass reads_gradients=True to Engine.run"
                )


def laid_out(flat: Tensor, parameter: Tensor) -> Tensor:
    """Returns `flat` as a tensor of the parameter's shape that lies in memory as the parameter does.

    As autograd lays gradients out: fused optimizers go through the memory of both without a look at their strides.
    """
    order = memory_order(parameter)
    return flat.view([parameter.shape[d] for d in order]).permute([order.index(d) for d in range(parameter.ndim)])


def flattened(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns the elements of `value`, of the parameter's shape, in the order of the parameter's memory."""
    return value.permute(memory_order(parameter)).reshape(-1)


def memory_order(parameter: Tensor) -> list[int]:
    """Returns the dimensions from the slowest to the fastest; as they are where elements lie apart or on another."""
    order = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    return order if parameter.permute(order).is_contiguous() else list(range(parameter.ndim))


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
