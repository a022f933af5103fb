"""Chunked cross-entropy: logits of some tokens at a time, in the forward and again in the backward.

The logits of a vocabulary are the largest tensor of a step: 8,192 tokens x 128,000 entries are 4 GiB in fp32, several
times over while the loss and its gradient are computed. So the output head returns a stand-in, `DeferredLogits`; the
loss function of the model, which is not changed, asks for `cross_entropy`, and gets it chunk by chunk. Under tensor
parallelism a chunk's logits are each rank's columns, and its loss the vocabulary-parallel one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fold3d.errors import ConfigError
from fold3d.tensor_parallel.vocabulary.logits import looks_at_no_element
from fold3d.tensor_parallel.vocabulary.rules import Call, NeedsWhole
from fold3d.trace.coat import Coat, Wrap

logger = logging.getLogger(__name__)


class Head:
    """The output head of a model, and how many tokens it takes at a time."""

    def __init__(self, compute: Callable[[Tensor], Tensor], size: int, tokens: int, *, tells: bool) -> None:
        """Args:
        compute: returns logits [..., size] of hidden states [..., width].
        tells: whether this rank says what needs all logits.
        """
        self.compute, self.size, self.tokens = compute, size, tokens
        self._tells, self._said = tells, set[str]()

    def say_whole(self, operation: str) -> None:
        """Logs, once per operation, why the logits of all tokens are there after all."""
        if self._tells and operation not in self._said:
            self._said.add(operation)
            logger.warning(
                "'%s' needs the logits of all tokens of a micro-batch, so chunked_loss=%d saves nothing there: only "
                "cross_entropy is computed in chunks. Let the loss be the model's own (labels among its inputs)",
                operation,
                self.tokens,
            )


class DeferredLogits(Tensor):
    """Stands for the logits of hidden states: shape, dtype and device are theirs, and there is no memory.

    Conversions of dtype, and what arranges tokens, give another stand-in. `cross_entropy` is computed in chunks. For
    anything else all logits are computed, once, with their gradient.
    """

    defers = True
    hidden: Tensor
    head: Head
    _whole: Tensor | None
    _in_graph: bool
    """Whether somebody has asked for the logits' place in the graph, or hooked it: then all is computed of that one."""

    @staticmethod
    def __new__(cls, hidden: Tensor, head: Head, dtype: torch.dtype) -> DeferredLogits:
        """Args:
        hidden: [..., width], of which the head makes logits.
        """
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls, (*hidden.shape[:-1], head.size), dtype=dtype, device=hidden.device, requires_grad=True
        )
        made.hidden, made.head, made._whole, made._in_graph = hidden, head, None, False
        with torch._C.DisableTorchFunctionSubclass():
            made.register_hook(partial(_refuse_gradient, head.tokens))  # type: ignore[no-untyped-call]
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = Call(func, args, kwargs or {})
        rule, first = _RULES.get(call.name), args[0] if args else None
        if call.name in _OF_THE_GRAPH and isinstance(first, DeferredLogits):
            return func(first.in_graph(call.name), *args[1:], **call.kwargs)
        if rule is not None and isinstance(first, DeferredLogits) and not first._in_graph:
            try:
                return rule(first, call)
            except NeedsWhole:
                pass
        elif looks_at_no_element(call):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*call.args, **call.kwargs)
        named = tree_map_only(DeferredLogits, lambda one: one.whole(call.name), (call.args, call.kwargs))
        return func(*named[0], **named[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tree_map_only(DeferredLogits, lambda one: one.whole(str(func)).detach(), (args, kwargs or {}))
        return func(*given[0], **given[1])

    def whole(self, operation: str) -> Tensor:
        """Returns the logits, computed now if they are not yet."""
        if self._whole is None or (torch.is_grad_enabled() and not self._whole.requires_grad):
            self.head.say_whole(operation)
            with torch._C.DisableTorchFunctionSubclass():
                dtype = self.dtype
            self._whole = self.head.compute(self.hidden).to(dtype)
        return self._whole

    def in_graph(self, operation: str) -> Tensor:
        """Returns the logits of all tokens, of which everything is computed from then on."""
        self._in_graph = True
        return self.whole(operation)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({', '.join(map(str, self.hidden.shape[:-1]))}, {self.head.size})"


_OF_THE_GRAPH = frozenset({"register_hook", "retain_grad", "backward", "grad_fn", "is_leaf", "grad", "output_nr"})


def _refuse_gradient(tokens: int, _gradient: Tensor) -> None:
    """A gradient came to what stands for logits, behind which there is nothing."""
    raise ConfigError(
        f"chunked_loss={tokens}: the loss function computes with the logits where nobody sees it (by a "
        "torch.autograd.Function of its own, torch.jit.script, torch.vmap, torch.func or a reentrant checkpoint), so "
        "their gradient would be lost. Remove chunked_loss, or compute with torch's functions"
    )


def _convert(logits: DeferredLogits, call: Call) -> Any:
    """`to`, `float` and the like."""
    with torch._C.DisableTorchFunctionSubclass():
        device, dtype = logits.device, logits.dtype
    others = [
        torch.empty(0, dtype=one.dtype, device=one.device) if isinstance(one, Tensor) else one for one in call.args[1:]
    ]
    probe = call.function(torch.empty(0, dtype=dtype, device=device), *others, **call.kwargs)
    if not isinstance(probe, Tensor) or probe.device != device:
        raise NeedsWhole
    return logits if probe.dtype == dtype else DeferredLogits(logits.hidden, logits.head, probe.dtype)


def _arrange(logits: DeferredLogits, call: Call) -> Any:
    """`view`, `[...]` and the like, where the vocabulary stays the last dimension: hidden states are arranged alike.

    Found out on tensors without memory.
    """
    if any(isinstance(one, (Tensor, torch.dtype)) for one in call.args[1:]):
        raise NeedsWhole
    rows, width, size = logits.hidden.shape[:-1], logits.hidden.shape[-1], logits.head.size
    with torch._C.DisableTorchFunctionSubclass():
        dtype = logits.dtype
        try:
            probe = call.function(torch.empty(*rows, size, device="meta"), *call.args[1:], **call.kwargs)
            if call.name == "__getitem__":
                longer = call.function(torch.empty(*rows, size + 1, device="meta"), *call.args[1:])
                if probe.shape[-1:] != (size,) or longer.shape != (*probe.shape[:-1], size + 1):
                    raise NeedsWhole
                return DeferredLogits(call.function(logits.hidden, *call.args[1:]), logits.head, dtype)
        except (RuntimeError, IndexError, TypeError):
            raise NeedsWhole from None  # the error comes again, of the logits
        if probe.shape[-1:] != (size,):
            raise NeedsWhole
        return DeferredLogits(logits.hidden.reshape(*probe.shape[:-1], width), logits.head, dtype)


def _cross_entropy(logits: DeferredLogits, call: Call) -> Any:
    """`cross_entropy` of [tokens, vocabulary] and class indices [tokens]."""
    target = call.argument(1, "target")
    reduction, ignored = call.argument(6, "reduction", "mean"), int(call.argument(4, "ignore_index", -100))
    legacy = (call.argument(2, "weight"), call.argument(3, "size_average"), call.argument(5, "reduce"))
    if legacy != (None, None, None) or reduction not in ("none", "sum", "mean") or logits.hidden.ndim != 2:
        raise NeedsWhole
    if not isinstance(target, Tensor) or target.ndim != 1 or target.dtype.is_floating_point:
        raise NeedsWhole
    with torch._C.DisableTorchFunctionSubclass():
        dtype = logits.dtype
    smoothing = float(call.argument(7, "label_smoothing", 0.0))
    each = "none" if reduction == "none" else "sum"

    def of(hidden: Tensor, labels: Tensor) -> Tensor:
        part = logits.head.compute(hidden).to(dtype)
        return functional.cross_entropy(part, labels, ignore_index=ignored, reduction=each, label_smoothing=smoothing)

    tokens = logits.head.tokens
    pairs = zip(torch.split(logits.hidden, tokens), torch.split(target, tokens), strict=True)
    losses: list[Any] = [checkpoint(of, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    if reduction == "none":
        return torch.cat(losses)
    total = torch.stack(losses).sum()
    return total / (target != ignored).sum() if reduction == "mean" else total


_RULES: dict[str, Callable[[DeferredLogits, Call], Any]] = {
    "cross_entropy": _cross_entropy,
    "contiguous": lambda logits, call: logits,
    **dict.fromkeys(("to", "float", "double", "half", "bfloat16", "type_as"), _convert),
    **dict.fromkeys(("view", "reshape", "flatten", "__getitem__"), _arrange),
}


def install_chunked_loss(coat: Coat, model: nn.Module, tokens: int, *, tells: bool = True) -> None:
    """Has the output head of a model, in training, return a stand-in for its logits.

    Args:
        tokens: whose logits are there at a time, at most.
        tells: whether this rank logs what needs all of them.
    Raises: ConfigError for a model that does not say which module its output head is.
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Module) or not hasattr(head, "out_features"):
        raise ConfigError(
            f"chunked_loss={tokens}: {type(model).__name__} has no output head of logits (get_output_embeddings); it "
            "is for language models. Remove it"
        )
    original, size = head.forward, int(find().out_features)
    made = Head(original, size, tokens, tells=tells)

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not head.training or not torch.is_grad_enabled() or args or kwargs:
            return original(input, *args, **kwargs)
        with torch.no_grad():
            dtype = original(input.flatten(0, -2)[:0]).dtype
        return DeferredLogits(input, made, dtype)

    coat.put(Wrap.CHUNKED_LOSS, head, forward)
