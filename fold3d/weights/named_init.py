"""Initial values by (seed, parameter name): bit-identical for any subset of the parameters, distributed as
the model wants.

The model's own initialisation runs (transformers' `initialize_weights`, or `reset_parameters` of each
module). Every random torch.nn.init function in it is replaced for the time by one that seeds the generator
from the name of the tensor it fills, and that does nothing to tensors that are not to be filled. What a
module draws by other means comes from a generator seeded with the module's name.

Of a parameter that is spread over a tensor-parallel group the whole is drawn and the rank's part kept (`Canvases`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.seeding import constant_of
from fold3d.trace.batches import is_transformers_model
from fold3d.weights.canvases import Canvases, CanvasGoneError
from fold3d.weights.parts import Parts
from fold3d.weights.release import parameter_holders

_INIT_FUNCTIONS = (
    "uniform_", "normal_", "constant_", "ones_", "zeros_", "eye_", "dirac_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_", "sparse_",
)  # fmt: skip
_RESETS = ("reset_parameters", "_reset_parameters")  # the latter: torch.nn.MultiheadAttention
_DONE = "_is_hf_initialized"  # transformers' mark of a tensor or module that must not be initialised


def initialise(model: nn.Module, fresh: Mapping[str, Tensor], seed: int, parts: Parts | None = None) -> None:
    """Fills the tensors `fresh` of `model` (real, by canonical name) and leaves all others as they are.

    The global generator is left as it was. Tensors that the model's own initialisation does not reach keep
    their values.

    Args:
        parts: which part of each parameter with values is here; None: all are whole. Any part has the bits that it has
            in the whole.
    """
    spread: dict[str, tuple[nn.Parameter, Any]] = {}
    for parameter, names in parameter_holders(model):
        shard = parts.shard_of(names[0]) if parts is not None else None
        if shard is not None and not parameter.is_meta:
            spread[names[0]] = parameter, shard
    if parts is None or not spread:
        _initialise(model, fresh, seed, lambda: None)
        return
    canvases = Canvases(spread, parts.rank, loaded=set(spread) - set(fresh))
    while True:
        try:
            with canvases:
                _initialise(model, fresh, seed, canvases.module_done)
            return
        except CanvasGoneError as redraw:
            canvases.hold_longer(str(redraw))


def _initialise(model: nn.Module, fresh: Mapping[str, Tensor], seed: int, module_done: Callable[[], None]) -> None:
    filler = _Filler(fresh, seed)
    covered: set[str] = set()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in model.named_modules():
            if is_transformers_model(module) and not any(
                name.startswith(f"{outer}.") or not outer for outer in covered
            ):
                covered.add(name)
                _initialise_transformers(name, module, filler, module_done)
        for name, module in reversed(list(model.named_modules())):  # children first, as constructors do
            if not any(not outer or name == outer or name.startswith(f"{outer}.") for outer in covered):
                _initialise_plain(name, module, filler)
                module_done()
        _initialise_adapters(model, filler)


class _Filler:
    """Knows the tensors to fill, and wraps initialisation functions so that they fill these by name."""

    def __init__(self, fresh: Mapping[str, Tensor], seed: int) -> None:
        self.fresh = fresh
        self._seed = seed
        self._names = {t.untyped_storage().data_ptr(): name for name, t in fresh.items() if t.numel()}

    def seed_for(self, text: str) -> None:
        torch.manual_seed(constant_of(f"{self._seed}/{text}") >> 1)

    def wrap(self, function: Callable[..., Any], holder: str | None = None) -> Callable[..., Any]:
        """Returns `function` for tensors to fill (with `holder`: only those that this module holds)."""

        def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_meta:
                return tensor
            name = self._names.get(tensor.untyped_storage().data_ptr())
            if name is None:  # a temporary: drawn from the module's own generator
                return function(tensor, *args, **kwargs)
            if holder is not None and name.rpartition(".")[0] != holder and not name.startswith(f"{holder}."):
                return tensor
            state = torch.get_rng_state()
            whole = tensor.shape == self.fresh[name].shape
            part = "" if whole else f"[{tensor.storage_offset()}:{tuple(tensor.shape)}:{tensor.stride()}]"
            self.seed_for(name + part)
            result = function(tensor, *args, **kwargs)
            torch.set_rng_state(state)
            return result

        return fill


@contextlib.contextmanager
def _replaced(table: Any, filler: _Filler, holder: str | None = None) -> Iterator[None]:
    """Replaces the initialisation functions in `table` (a dict, or the module torch.nn.init)."""
    attributes = table if isinstance(table, dict) else vars(table)
    saved = {name: attributes[name] for name in _INIT_FUNCTIONS if name in attributes}
    attributes.update({name: filler.wrap(function, holder) for name, function in saved.items()})
    try:
        yield
    finally:
        attributes.update(saved)


def _initialise_transformers(prefix: str, model: Any, filler: _Filler, module_done: Callable[[], None]) -> None:
    from transformers import initialization

    names = {id(module): f"{prefix}/{name}" for name, module in model.named_modules()}
    fresh = {id(tensor) for tensor in filler.fresh.values()}
    marked: list[Any] = []

    def mark(thing: Any) -> None:
        if not getattr(thing, _DONE, False):
            setattr(thing, _DONE, True)
            marked.append(thing)

    for module in model.modules():
        vars(module).pop(_DONE, None)
        if not any(id(t) in fresh for t in (*module.parameters(), *module.buffers())):
            mark(module)
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in fresh:
            mark(tensor)
    submodels = [module for module in model.modules() if is_transformers_model(module)]
    for submodel in submodels:
        submodel._initialize_weights = _seeded(submodel._initialize_weights, names, filler, module_done)
    try:
        with _replaced(initialization.TORCH_INIT_FUNCTIONS, filler):
            model.initialize_weights()
    finally:
        for submodel in submodels:
            del submodel._initialize_weights
        for thing in marked:
            vars(thing).pop(_DONE, None)


def _initialise_adapters(model: Any, filler: _Filler) -> None:
    """LoRA begins with a product of zero, as PEFT's own layers say, and not as other linear layers of the model."""
    for adapter, config in getattr(model, "peft_config", {}).items():
        with _replaced(torch.nn.init, filler):
            for module in model.modules():
                if callable(getattr(module, "reset_lora_parameters", None)):
                    module.reset_lora_parameters(adapter, getattr(config, "init_lora_weights", False))


def _seeded(
    function: Callable[..., None], names: Mapping[int, str], filler: _Filler, done: Callable[[], None]
) -> Callable[..., None]:
    def initialize_weights(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        filler.seed_for(f"module {names[id(module)]}")
        function(module, *args, **kwargs)
        done()

    return initialize_weights


def _initialise_plain(name: str, module: nn.Module, filler: _Filler) -> None:
    reset = next((getattr(module, method) for method in _RESETS if callable(getattr(module, method, None))), None)
    fresh = {id(tensor) for tensor in filler.fresh.values()}
    if reset is None or not any(id(t) in fresh for t in (*module.parameters(), *module.buffers())):
        return
    # Tensors of this module that must keep their values (or have no storage) are replaced for the time, so
    # that the module draws the same numbers whatever is to be filled.
    prefix = f"{name}." if name else ""
    kept = {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None and f"{prefix}{key}" not in filler.fresh
    }
    module._parameters.update(
        {key: nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad) for key, p in kept.items()}
    )
    filler.seed_for(f"module {name}")
    try:
        with _replaced(torch.nn.init, filler, name or None):
            reset()
    finally:
        module._parameters.update(kept)
