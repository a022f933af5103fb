"""ParameterReadiness: a layer's first forward waits until its own parameters are up to date, and for nothing else; so
does whoever else reads or writes one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter

from fold3d.data_parallel.bucket import Bucket
from fold3d.trace.coat import Coat, Wrap

_LOOKS = frozenset(
    {
        *("device", "dtype", "shape", "size", "layout", "ndim", "dim", "ndimension", "numel", "nelement", "stride"),
        *("itemsize", "element_size", "nbytes", "is_contiguous", "is_floating_point", "is_complex", "is_signed"),
        *("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_leaf"),
        *("grad", "_grad", "grad_fn", "requires_grad", "requires_grad_", "retains_grad", "_version", "output_nr"),
        *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "_post_accumulate_grad_hooks"),
        *("__hash__", "__len__", "data_ptr", "storage_offset", "is_inference", "get_device", "grad_dtype"),
    }
)
"""What torch asks of a tensor, and sets, that has nothing to do with its values."""


class ParameterReadiness:
    """Which buckets are not up to date, and what must not run before they are.

    Attributes:
        waits_unseen: whether any parameter that is to wait cannot tell that somebody reads it: then none may.

    While a parameter waits for its update, its class is one that is told of all that torch is asked to do with it.
    Whatever reads or writes its values, such as an average of weights or a clamp in a loop of the user's, finds those
    of now, and is not overwritten. What reads its memory under another name (`parameter.data`, kept from before) is
    not seen; a write to that is refused, unless it comes through `.data`.
    """

    def __init__(
        self,
        coat: Coat,
        model: Module,
        buckets: Sequence[Bucket],
        open_bucket: Callable[[Bucket], None],
        read: Callable[[], None],
    ):
        """Args:
        coat: hooks on the model go with it.
        open_bucket: brings one bucket up to date; blocks until that is done.
        read: called before somebody reads or writes weights that no forward has waited for; opens all.
        """
        self._open_bucket = open_bucket
        self._closed: dict[int, Bucket] = {}
        self._is_opening = False
        self.waits_unseen = False
        self._of_chunk: dict[int, list[Bucket]] = {}
        self._waiting = _waiting_for(read)
        of_module: dict[str, list[Bucket]] = {}
        for bucket in buckets:
            for chunk in bucket.spec.chunks:
                self._of_chunk.setdefault(chunk, []).append(bucket)
            for name in bucket.spec.modules:
                of_module.setdefault(name, []).append(bucket)
        for name, waiting in of_module.items():
            coat.put(Wrap.READY, model.get_submodule(name), self._hook(waiting))
        for bucket in buckets:
            coat.callback(self._wait_no_more, bucket)
        coat.callback(self._closed.clear)

    def close(self, bucket: Bucket) -> None:
        """The bucket is about to change: nobody may read it before it is open again."""
        self._closed[bucket.number] = bucket
        for parameter in bucket.parameters:
            if type(parameter) is Parameter:  # another class may be told of such things itself
                parameter.__class__ = self._waiting
            else:
                self.waits_unseen = True

    def is_closed(self, bucket: Bucket) -> bool:
        """Whether the bucket is not up to date."""
        return bucket.number in self._closed

    @property
    def is_waiting(self) -> bool:
        """Whether any bucket is not up to date, and none is just being brought up to date."""
        return bool(self._closed) and not self._is_opening

    def before_chunk(self, chunk: int) -> None:
        """Opens what is read in chunk `chunk` by nobody knows which module."""
        if self._closed:
            self._open(self._of_chunk.get(chunk, ()))

    def open_chunk(self, chunk: int) -> None:
        """Opens all of a chunk's buckets."""
        self._open([bucket for bucket in list(self._closed.values()) if bucket.spec.chunk == chunk])

    def open_all(self) -> None:
        """Brings all parameters of this rank up to date."""
        self._open(list(self._closed.values()))

    def _open(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.number in self._closed:
                self._wait_no_more(bucket)
                self._is_opening = True
                try:
                    self._open_bucket(bucket)
                finally:
                    self._is_opening = False
                del self._closed[bucket.number]

    def _wait_no_more(self, bucket: Bucket) -> None:
        for parameter in bucket.parameters:
            if type(parameter) is self._waiting:
                parameter.__class__ = Parameter

    def _hook(self, waiting: Sequence[Bucket]) -> Callable[..., None]:
        def before_forward(*_: Any) -> None:
            if self._closed:
                self._open(waiting)

        return before_forward


def _waiting_for(read: Callable[[], None]) -> type[Parameter]:
    """Returns a class of parameters for which `read` is called before torch does anything with their values."""

    class WaitingParameter(Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            of = func.__self__ if func.__name__ in ("__get__", "__set__") else func  # of an attribute
            with torch._C.DisableTorchFunctionSubclass():
                if of.__name__ not in _LOOKS:
                    read()
                result = func(*args, **(kwargs or {}))
            # `Parameter(parameter)` has seen another class than torch's, and wants this one of what it detaches.
            if of.__name__ == "detach" and sys._getframe(1).f_code is Parameter.__new__.__code__:
                return torch.Tensor._make_subclass(Parameter, result, False)
            return result

        def __deepcopy__(self, memo: Any) -> Any:
            read()
            return Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]  # of the class that it has by now

    return WaitingParameter
