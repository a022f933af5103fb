"""Modes of torch in which a block is tried: in double precision, without random numbers, what does not change computed
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fold3d._C import note_product
from fold3d.tensor_parallel.operators import of_fold3d

GROUPED = frozenset({torch._grouped_mm, torch.nn.functional.grouped_mm})
"""The functions that it stands for."""


def grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Returns what `torch.nn.functional.grouped_mm` does, and zeros in rows and columns behind the last group.

    Args:
        mat_a: [M, K] or [groups, M, K].
        mat_b: [K, N] or [groups, K, N].
        offs: [groups] where each group ends in the dimension that the groups share: M where only `mat_b` has a
            dimension of groups, N where only `mat_a` has one, K where neither has. None where both have.
    """
    if offs is None:
        found = torch.bmm(mat_a, mat_b)
    else:
        pieces = list(enumerate(pairwise((0, *offs.tolist()))))
        if mat_b.dim() == 3:
            parts = [mat_a[first:end] @ mat_b[k] for k, (first, end) in pieces]
            rest = mat_a.new_zeros(mat_a.shape[0] - pieces[-1][1][1], mat_b.shape[2])
            found = torch.cat([*parts, rest])
        elif mat_a.dim() == 3:
            parts = [mat_a[k] @ mat_b[:, first:end] for k, (first, end) in pieces]
            rest = mat_b.new_zeros(mat_a.shape[1], mat_b.shape[1] - pieces[-1][1][1])
            found = torch.cat([*parts, rest], 1)
        else:
            found = torch.stack([mat_a[:, first:end] @ mat_b[first:end] for _, (first, end) in pieces])
    found = found if bias is None else found + bias
    return found if out_dtype is None else found.to(out_dtype)


class DoubleMode(TorchFunctionMode):
    """Norms and softmaxes of many models ask for float32; comparisons to 1e-10 want more.

    So do tensors that are made without a type, such as a mask of the scores' smallest number: while the mode is
    entered, that is double precision in the whole process. Grouped matrix products, which torch has none of in double
    precision, are made of single ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[torch.dtype] = []

    def __enter__(self) -> DoubleMode:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._before.pop())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double(*args[1:], **kwargs)
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        if func in GROUPED and args[0].dtype == torch.float64:
            with of_fold3d():
                found = grouped_mm(*args, **kwargs)
            note_product(found, [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)])
            return found
        return func(*args, **kwargs)


_DROPOUTS = frozenset(
    {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.feature_dropout}
)
_INSTEAD: Mapping[Any, float] = {
    torch.rand: 0.5, torch.rand_like: 0.5, Tensor.uniform_: 0.5, torch.randn: 0.0, torch.randn_like: 0.0,
    Tensor.normal_: 0.0, torch.bernoulli: 1.0, Tensor.bernoulli_: 1.0,
}  # fmt: skip
"""Random functions -> a number that they might draw."""
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class WithoutDraws(TorchFunctionMode):
    """While it is entered, dropout drops nothing, and other random functions return one number everywhere."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else named["input"]
        if func is F.scaled_dot_product_attention:
            named = {**dict(zip(_ATTENTION, args, strict=False)), **named, "dropout_p": 0.0}
            return func(**named)
        if func not in _INSTEAD:
            return func(*args, **named)
        state = torch.get_rng_state()
        drawn = func(*args, **named)
        torch.set_rng_state(state)
        with torch.no_grad(), of_fold3d():
            return drawn.fill_(_INSTEAD[func])


_PLAIN = (int, float, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_UNSEEN = frozenset({Tensor.data.__get__, Tensor.numpy})  # type: ignore[attr-defined]
"""Who writes to what these return writes to the tensor, which does not notice."""


class Again(TorchFunctionMode):
    """Calls of functions with the very tensors of an earlier run return what they returned then.

    Tensors are the same if they are the same objects and nobody has written to them since. Those that are handed out a
    second time may be written to by who gets them: the third one has new ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, int, int]] = {}  # id -> the tensor, its version, its number
        self._made: dict[Any, Tensor] = {}
        self._count = 0

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These are the same in each run."""
        for tensor in tensors:
            self._count += 1
            self._known[id(tensor)] = tensor, tensor._version, self._count

    @contextmanager
    def without(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """While it is entered, these may be others than in other runs."""
        known = {id(tensor): self._known.pop(id(tensor)) for tensor in tensors if id(tensor) in self._known}
        try:
            yield
        finally:
            self._known |= known

    def is_unwritten(self, tensor: Tensor) -> bool:
        """Whether a tensor is the same in each run, and nobody has written to it."""
        return self._number(tensor) is not None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Returns what the function returned for the same arguments, or calls it."""
        kwargs = kwargs or {}
        if func in _UNSEEN:
            self._known.pop(id(args[0]), None)
        call = self._call(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        before = self._made.get(call)
        if before is not None and self.is_unwritten(before):
            return before
        result = func(*args, **kwargs)
        if type(result) is Tensor and id(result) not in self._known:  # else it is an argument, perhaps written to
            self.know([result])
            self._made[call] = result
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what is equal for calls with the same arguments; None where that cannot be told."""
        described: list[Any] = [func]
        seen = False
        for argument in (*args, *kwargs.keys(), *kwargs.values()):
            if isinstance(argument, Tensor):
                number = self._number(argument)
                if number is None:
                    return None
                seen = True
                described.append((Tensor, number))
            elif isinstance(argument, _PLAIN):
                described.append((type(argument), argument))
            elif isinstance(argument, (tuple, list)) and all(isinstance(one, _PLAIN) for one in argument):
                described.append((type(argument), *((type(one), one) for one in argument)))
            else:
                return None
        return tuple(described) if seen else None

    def _number(self, tensor: Tensor) -> int | None:
        known, version, number = self._known.get(id(tensor), (None, 0, 0))
        return number if known is tensor and tensor._version == version else None
