"""Canvases: parameters that are spread look whole to initialisations, and take memory for the whole only while drawn.

What a model's own initialisation draws depends on whole shapes (fans, and how many random numbers are drawn), and it
may draw in views, in `.data` or from a parent module. So each parameter that is spread stands on a canvas of the whole
shape in memory that is mapped, but not there until it is touched. As soon as another parameter is drawn, the rank's
part is copied off the canvas and the canvas's memory is given back.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fold3d.errors import TraceError
from fold3d.sharding.shard import Shard
from fold3d.weights.parts import check_shape

_OVERWRITES = frozenset(
    f"aten::{name}_" for name in ("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal",
                                  "normal", "random", "uniform", "zero")
)  # fmt: skip
"""In-place operations that do not look at what was there."""


class Hold(Enum):
    """Until when a parameter's canvas is kept once it is drawn on."""

    ALONE = "another parameter is drawn"
    MODULE = "its module's initialisation ends"
    ALL = "the whole initialisation ends"


class _State(Enum):
    BLANK = "nothing was drawn yet"
    DRAWN = "the values are on the canvas"
    KEPT = "the values are in the part, the canvas has no memory"


class _Use(Enum):
    """Of a canvas, by one operation."""

    READS = "looks at it"
    CHANGES = "draws in places, or over what is there"
    OVERWRITES = "draws all of it, whatever was there"


class CanvasGoneError(Exception):
    """A parameter is needed whole after its canvas was given back: all is to be drawn again, and it held longer."""


class _Canvas:
    """One parameter."""

    def __init__(self, name: str, parameter: nn.Parameter, shard: Shard, rank: int, *, is_loaded: bool) -> None:
        self.name, self.parameter, self.part = name, parameter, parameter.data
        self.is_loaded = is_loaded
        self._shard, self._rank = shard, rank
        shape = shard.whole_shape(self.part.shape)
        check_shape(name, shard, shape)
        size = torch.Size(shape).numel()
        self._memory = mmap.mmap(-1, max(1, size * self.part.element_size()), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.whole = torch.frombuffer(self._memory, dtype=torch.uint8)[: size * self.part.element_size()]
        self.whole = self.whole.view(self.part.dtype).view(shape)
        self.state = _State.BLANK
        parameter.data = self.whole

    def keep(self) -> None:
        """Copies this rank's part off the canvas, and gives its memory back."""
        if self.state is _State.DRAWN:
            if not self.is_loaded:
                self._shard.copy_to_part(self.part, self.whole, self._rank)
            self._memory.madvise(mmap.MADV_DONTNEED)
            self.state = _State.KEPT

    def mark_unset(self) -> None:
        """What is not drawn now shows as NaN later."""
        if self.whole.is_floating_point() and self.whole.element_size() > 1:
            self.whole.fill_(float("nan"))


class Canvases(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which parameters that are spread are drawn; afterwards they are this rank's parts.

    Raises: RedrawError out of whatever draws: `hold_longer`, then all is drawn again in a new context.
    """

    def __init__(self, spread: Mapping[str, tuple[nn.Parameter, Shard]], rank: int, loaded: set[str]) -> None:
        """Args:
        spread: parameters that hold this rank's parts, by name.
        rank: place in the tensor-parallel group.
        loaded: names of those that have values already, which stay; the others are drawn.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._spread, self._rank, self._loaded = spread, rank, loaded
        self._hold: dict[str, Hold] = {}
        self._by_memory: dict[int, _Canvas] = {}
        self._drawn: dict[str, _Canvas] = {}
        self._inside = False

    def __enter__(self) -> Canvases:
        for name, (parameter, shard) in self._spread.items():
            canvas = _Canvas(name, parameter, shard, self._rank, is_loaded=name in self._loaded)
            self._by_memory[canvas.whole.untyped_storage().data_ptr()] = canvas
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None:
            self._keep_all(Hold.ALL)
        self._drawn.clear()
        for canvas in self._by_memory.values():
            canvas.parameter.data = canvas.part
        self._by_memory.clear()

    def module_done(self) -> None:
        """A module's initialisation has ended."""
        self._inside = True  # copying to the parts is no drawing
        try:
            self._keep_all(Hold.MODULE)
        finally:
            self._inside = False

    def hold_longer(self, name: str) -> None:
        """From the next context on parameter `name` is held longer."""
        self._hold[name] = Hold.ALL if name in self._hold else Hold.MODULE

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside:
            self._inside = True
            try:
                self._prepare(func, args, kwargs)
            finally:
                self._inside = False
        return func(*args, **kwargs)

    def _prepare(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        touched = {canvas.name: canvas for canvas, _ in self._uses(func, args, kwargs)}
        for name, canvas in [item for item in self._drawn.items() if item[0] not in touched]:
            if touched and name not in self._hold:
                canvas.keep()
                del self._drawn[name]
        for canvas, use in self._uses(func, args, kwargs):
            if canvas.state is not _State.DRAWN and use is not _Use.OVERWRITES:
                self._need(canvas, use)
            canvas.state = _State.DRAWN
            self._drawn[canvas.name] = canvas

    def _need(self, canvas: _Canvas, use: _Use) -> None:
        """The canvas is looked at, or drawn on in places."""
        if canvas.is_loaded and use is _Use.CHANGES:  # in vain
            return
        if canvas.is_loaded:
            raise TraceError(
                f"the initialisation of the model looks at '{canvas.name}', of which this rank has a part only; let it "
                "fill parameters that have no values yet without those that have, or give all of them values"
            )
        if canvas.state is _State.KEPT:
            raise CanvasGoneError(canvas.name)
        canvas.mark_unset()

    def _uses(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[_Canvas, _Use]]:
        """Yields each canvas whose values an operation needs or sets."""
        schema = func._schema
        if schema.name.endswith("_like") or schema.name.startswith("aten::new_"):  # these look at shapes only
            return
        for place, argument in enumerate(schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            if alias is not None and not alias.is_write:  # a view
                continue
            for tensor in tree_leaves(value):
                if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
                    continue
                canvas = self._by_memory.get(tensor.untyped_storage().data_ptr())
                if canvas is not None and tensor.numel():
                    is_all = tensor.numel() == canvas.whole.numel()
                    if alias is None:
                        yield canvas, _Use.READS
                    elif is_all and (schema.name in _OVERWRITES or argument.name == "out"):
                        yield canvas, _Use.OVERWRITES
                    else:
                        yield canvas, _Use.CHANGES

    def _keep_all(self, until: Hold) -> None:
        for name, canvas in list(self._drawn.items()):
            if until is Hold.ALL or self._hold.get(name, Hold.ALONE) is not Hold.ALL:
                canvas.keep()
                del self._drawn[name]
