"""CapturedCalls of a model: each block's arguments in one forward, without the model's weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fold3d.errors import TraceError
from fold3d.sharding.split import Path
from fold3d.tensor_parallel.slices import paths_of
from fold3d.trace.arguments import Arguments, without_key_values
from fold3d.trace.coat import Coat, Wrap, copy_without_coat
from fold3d.trace.model_trace import Trace
from fold3d.trace.repeated import kinds_of
from fold3d.trace.shape_only import ShapeOnly
from fold3d.trace.wrappers import drop_hooks, is_users, users_hooks, whole_shape
from fold3d.weights.materialize import materialize

_DEVICE = Tensor.device.__get__
_MASK = "attention_mask"
SAMPLES = 2
"""That blocks are run on."""
_LENGTH = 8
"""Of the sequences that blocks are run on; what is a head or a neuron does not depend on it."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """A block without weights (parameters on the meta device, real buffers), and how the model calls it."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: frozenset[Path]
    """Tensors among its results that somebody reads."""
    handed: Mapping[Path, tuple[str, Path]] = field(default_factory=dict)
    """Arguments that are what an earlier block returned, as it is -> (that block, place in its result)."""

    def shape_at(self, path: Path) -> torch.Size | None:
        """Returns the shape of an argument; None where there is no tensor."""
        return next((x.shape for at, x in paths_of((self.args, self.kwargs)) if at[1:] == path), None)


class _Done(BaseException):
    """Ends the forward after the last block."""


def skeleton_of(model: nn.Module, trace: Trace) -> nn.Module:
    """Returns a copy of the model for `capture`, in evaluation mode: real buffers, no parameters but those that code
    outside of the modules that hold them reads."""
    shadow = _skeleton(model)
    materialize(shadow, set(), seed=0)
    _fill_direct(shadow, trace)
    return shadow.eval()


def capture(
    model: nn.Module,
    trace: Trace,
    example: Mapping[str, Any],
    length: int = _LENGTH,
    shadow: nn.Module | None = None,
    *,
    pads: bool = True,
) -> dict[str, CapturedCall]:
    """Runs the model's own forward up to its last block, and returns how each block was called, by name.

    Modules with parameters outside of the blocks, and the blocks, return random numbers of the right shapes, so nothing
    is computed from weights; masks, positions and the like come from the model's own code. The model is not touched.

    Args:
        length: tokens that texts of the example are shortened to, where the model takes such.
        shadow: `skeleton_of` the model, whose blocks the calls have; None: a new one.
        pads: whether a text has padding, where the model takes a mask, whatever the example says.
    Raises: TraceError when the forward fails, or puts other modules in the place of those in blocks.
    """
    shadow = skeleton_of(model, trace) if shadow is None else shadow
    padded = _padded(shadow, example) if pads else dict(example)
    short, whole = _batch(padded, length, pads=pads), _batch(padded, None, pads=pads)
    try:
        run = _CapturedRun(shadow, trace, example, short)
        calls = run(None)
    except Exception:  # a model may want sequences of the length that it was recorded with
        try:
            run = _CapturedRun(shadow, trace, example, whole)
            calls = run(None)
        except Exception as error:
            raise TraceError(
                f"{type(model).__name__} could not be run on the example to find out how its blocks may be split: "
                f"{type(error).__name__}: {error}"
            ) from error
    _check_modules(model, shadow, trace)
    read: dict[str, set[Path]] = {name: {path for path, _ in paths_of(out)[:1]} for name, out in run.results.items()}
    extra = {path for out in run.results.values() for path, _ in paths_of(out)[1:]}
    for path in sorted(extra, key=str):
        seen = run(path)
        if any(_has_nan(call) for call in seen.values()):
            for name in read:
                read[name].add(path)
    return {
        name: CapturedCall(shadow.get_submodule(name), args, kwargs, frozenset(read[name]), run.handed[name])
        for name, (args, kwargs) in calls.items()
    }


def _check_modules(model: nn.Module, shadow: nn.Module, trace: Trace) -> None:
    """Raises: TraceError when the run of `shadow`, a copy, has replaced modules inside of blocks: what is installed on
    those of the model would be lost (BigBird takes other attention for short sequences)."""
    for name in trace.modules:
        ran = dict(shadow.get_submodule(name).named_modules(prefix=name))
        for path, module in model.get_submodule(name).named_modules(prefix=name):
            found = type(ran.get(path))
            if found is not type(module):
                raise TraceError(
                    f"the forward of {type(model).__name__} puts another module in the place of '{path}' "
                    f"({type(module).__name__}), and tp above 1 divides the modules that are there before it: have "
                    "the model's configuration say what it shall run (attention_type, say), or set tp=1"
                )


class _InHostMemory(TorchFunctionMode):
    """Weights without values say that they lie where the batch does: the model's code may ask one where to put it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return torch.device("cpu") if func == _DEVICE and found.type == "meta" else found


class _CapturedRun:
    """Runs of the model on one batch."""

    def __init__(self, shadow: nn.Module, trace: Trace, example: Mapping[str, Any], batch: dict[str, Any]) -> None:
        self._shadow, self._trace, self._batch = shadow, trace, dict(batch)
        self._called = example.called(shadow) if isinstance(example, Arguments) else shadow
        if "use_cache" in inspect.signature(self._called.forward).parameters:
            self._batch.setdefault("use_cache", False)
        self._outer = [n for n in dict.fromkeys((*trace.prologue, *trace.between)) if _has_parameters(shadow, n)]
        self._shapes = _shapes_of_blocks(shadow, trace)
        self._shapes |= {n: ShapeOnly(n, shadow.get_submodule(n)) for n in self._outer}
        self.results: dict[str, Any] = {}
        self.handed: dict[str, dict[Path, tuple[str, Path]]] = {}

    def __call__(self, poisoned: Path | None) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
        """Returns (args, kwargs) of each block; the result of each at `poisoned` is NaN."""
        calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        passed: list[str] = []
        made: dict[tuple[int, torch.Size], tuple[str, Path]] = {}
        draws = _Draws()

        def stub(name: str, is_block: bool) -> Any:
            shape_only = self._shapes[name]

            def forward(*args: Any, **kwargs: Any) -> Any:
                args, kwargs = without_key_values(args, kwargs)
                if is_block:
                    if name in calls:  # what it returned before may be gone, and its memory somebody else's
                        for place in [place for place, (before, _) in made.items() if before == name]:
                            del made[place]
                    if poisoned is None:
                        self.handed[name] = _handed(made, (args, kwargs))
                    calls[name] = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
                output = shape_only(torch.device("cpu"), args, kwargs)
                output = tree_map_only(Tensor, draws.like, output)
                if is_block:
                    self.results[name] = output
                    for path, leaf in paths_of(output):
                        if leaf.numel():
                            made[leaf.data_ptr(), leaf.shape] = name, path
                        if path == poisoned and leaf.is_floating_point():
                            leaf.fill_(float("nan"))
                    passed.append(name)
                    if len(passed) == len(self._trace.blocks):
                        raise _Done
                return output

            return forward

        with Coat() as coat, suppress(_Done):
            for names, is_block in ((self._outer, False), (self._trace.modules, True)):
                for name in names:
                    coat.put(Wrap.STAND_IN, self._shadow.get_submodule(name), stub(name, is_block))
            with torch.no_grad(), _InHostMemory():
                self._called(**self._batch)
        return calls


def _handed(made: Mapping[tuple[int, torch.Size], tuple[str, Path]], call: Any) -> dict[Path, tuple[str, Path]]:
    """Returns which arguments are what an earlier block returned, given where that lies in memory."""
    arguments = [(path[1:], leaf) for path, leaf in paths_of(call)]
    return {path: found for path, x in arguments if (found := made.get((x.data_ptr(), x.shape))) is not None}


def _shapes_of_blocks(shadow: nn.Module, trace: Trace) -> dict[str, ShapeOnly]:
    """Returns what stands for each block; it is the same for blocks that are made alike and returned the like."""
    blocks = {name: shadow.get_submodule(name) for name in trace.modules}
    place = {name: place for place, name in reversed(list(enumerate(trace.blocks)))}
    returned = [(trace.costs[k].flops, trace.structures[k], trace.shapes[k]) for k in map(place.__getitem__, blocks)]
    first: dict[int, ShapeOnly] = {}
    return {
        name: first.setdefault(kind, ShapeOnly(name, block))
        for (name, block), kind in zip(blocks.items(), kinds_of(list(blocks.values()), returned), strict=True)
    }


def _skeleton(model: nn.Module) -> nn.Module:
    """Returns a copy whose parameters are on the meta device, without hooks and wrappers of others."""
    memo: dict[int, Any] = {id(hook): hook for module in model.modules() for hook in users_hooks(module)}
    for parameter in model.parameters():
        empty = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    shadow = copy_without_coat(model, memo)
    for module in shadow.modules():
        drop_hooks(module, is_users)
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.cpu()
        if getattr(module, "gradient_checkpointing", False):
            setattr(module, "gradient_checkpointing", False)  # noqa: B010 (no Tensor and no Module)
    config = getattr(shadow, "config", None)
    if str(getattr(config, "_attn_implementation", "")).startswith("flash"):
        shadow.set_attn_implementation("sdpa")  # type: ignore[operator]
    return shadow


def _fill_direct(shadow: nn.Module, trace: Trace) -> None:
    """Gives values to parameters that code outside of the modules that hold them reads."""
    draw = torch.Generator().manual_seed(1)
    for name in trace.direct:
        holder, _, attribute = name.rpartition(".")
        module = shadow.get_submodule(holder)
        parameter = module._parameters.get(attribute)
        if parameter is not None and parameter.is_meta:
            real = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            module._parameters[attribute] = nn.Parameter(real, requires_grad=parameter.requires_grad)


def _has_parameters(model: nn.Module, name: str) -> bool:
    return next(model.get_submodule(name).parameters(), None) is not None


def _padded(model: nn.Module, example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the example with an attention mask, where the model takes one for its input_ids.

    Attention takes other ways with padding than without: one that repeats the key heads of a group reads how often, and
    one of torch's own that needs no mask does not, so that only the former shows which numbers are to be divided.
    """
    called = example.called(model) if isinstance(example, Arguments) else model
    ids = example.get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 2 and _MASK in inspect.signature(called.forward).parameters:
        return {_MASK: torch.ones(ids.shape, dtype=torch.long), **example}
    return dict(example)


def _batch(example: Mapping[str, Any], length: int | None, *, pads: bool = True) -> dict[str, Any]:
    """Returns two samples of the example, with values, of sequences no longer than `length`."""
    tensors = [value for value in example.values() if isinstance(value, Tensor) and value.dim()]
    samples = tensors[0].shape[0] if tensors else 0
    texts = [value.shape[1] for value in tensors if value.dim() == 2 and not value.is_floating_point()]

    def change(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_meta or "mask" in name:
            ones = torch.ones(tensor.shape, dtype=tensor.dtype)
            tensor = torch.randn(tensor.shape).to(tensor.dtype) if tensor.is_floating_point() else ones
        tensor = tensor.detach().cpu()
        if tensor.dim() and tensor.shape[0] == samples:
            tensor = tensor[[k % samples for k in range(SAMPLES)]]
            if length is not None and tensor.dim() > 1 and texts and tensor.shape[1] == texts[0]:
                tensor = tensor[:, :length]
        if pads and name == _MASK and tensor.dim() == 2:
            tensor = tensor.clone()
            tensor[0, -1] = 0  # behind the text, so that each place still has one to look at
        return tensor

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return {name: tree_map_only(Tensor, partial(change, name), value) for name, value in example.items()}


class _Draws:
    """Random numbers: of a shape they are drawn once, and then come in another order; giant models take many."""

    def __init__(self) -> None:
        self._draw = torch.Generator().manual_seed(0)
        self._drawn: dict[tuple[torch.Size, torch.dtype], Tensor] = {}
        self._turns = 0

    def like(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape and type of `x`; `x` itself where it is not in floating point."""
        if not x.is_floating_point():
            return x
        key = x.shape, x.dtype
        if key not in self._drawn:
            self._drawn[key] = torch.randn(x.shape, generator=self._draw).to(x.dtype)
        self._turns += 1
        return self._drawn[key].roll(self._turns)


def _has_nan(call: Any) -> bool:
    leaves = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return any(bool(torch.isnan(leaf).any()) for leaf in leaves)
