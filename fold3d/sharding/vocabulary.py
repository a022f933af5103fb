"""Vocabulary: which embedding and which output head are spread over a tensor-parallel group by entries, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

from fold3d.sharding.shard import Shard
from fold3d.torch_private import StorageLabels
from fold3d.trace.capture import example_for, run_forward, tied_groups
from fold3d.trace.model_trace import Trace
from fold3d.trace.repeated import Twins
from fold3d.trace.shadow import shadow_of


class VocabularyReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows one forward of a copy of the model whose tensors are fake.

    Attributes:
        before, within, after: names of the nn.Embeddings and nn.Linears outside of blocks that ran before the first
            block, while a block ran, and after the last one, in the order of their first calls.
        looked_up: those of `before` whose indices are an argument of the model or a view of one: tokens, not positions.
        elsewhere: id of a parameter of theirs in the model -> what else than modules that hold it reads it.
    """

    def __init__(self, model: nn.Module, shadow: nn.Module, blocks: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: list[str] = []
        self.within: list[str] = []
        self.after: list[str] = []
        self.looked_up: list[str] = []
        self._arguments = StorageLabels[bool]()
        self.elsewhere: dict[int, str] = {}
        self._running: list[tuple[str, nn.Module]] = []
        self._blocks = frozenset(blocks)
        self._blocks_left = set(self._blocks)
        self._begun = False
        self._originals = StorageLabels[tuple[int, int]]()
        originals = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in shadow.named_parameters(remove_duplicate=False):
            self._originals[parameter] = id(originals[name]), id(parameter)
        for name, module in shadow.named_modules():
            module.register_forward_pre_hook(self._enter(name), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
            if not self._running:
                for tensor in tensors:
                    self._arguments[tensor] = True
            in_block = any(running in self._blocks for running, _ in self._running)
            self._running.append((name, module))
            if name in self._blocks:
                self._begun = True
            elif isinstance(module, (nn.Embedding, nn.Linear)) and not in_block:
                seen = self.before if not self._begun else self.within if self._blocks_left else self.after
                if name not in seen:
                    seen.append(name)
                if seen is self.before and any(map(self._arguments.get, tensors)):
                    self.looked_up.append(name)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name, _ = self._running.pop()
        self._blocks_left.discard(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in arg_tree_leaves(*args, **kwargs):
            if isinstance(leaf, Tensor) and (known := self._originals.get(leaf)) is not None:
                original, parameter = known
                reader, module = self._running[-1] if self._running else ("the loss", None)
                holders = () if module is None else module._parameters.values()
                if all(id(one) != parameter for one in holders):
                    self.elsewhere.setdefault(original, reader or "the model")
        return func(*args, **kwargs)


def watch_reads(model: nn.Module, trace: Trace, example: Mapping[str, Any] | None) -> VocabularyReads:
    """Returns what one training forward of `model` reads; see `trace` for what is raised.

    Args:
        trace: its recording. If by that no block reads weights that lie outside of the blocks, too, of equal blocks a
            few run.
        example: keyword arguments of the forward; None: made up.
    """
    given = example_for(model) if example is None else example
    with shadow_of(model) as shadow:
        if not trace.direct and not _blocks_share(trace):
            Twins(shadow.model, trace, given)
        reads = VocabularyReads(model, shadow.model, trace.modules)
        run_forward(shadow, given, reads)
    return reads


def _blocks_share(trace: Trace) -> bool:
    """Whether a weight in a block has another name, too."""
    insides = tuple(f"{block}." for block in trace.modules)
    return any(name.startswith(insides) for group in trace.tied for name in group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Of a model. Empty where nothing is spread."""

    embeddings: Mapping[str, Shard] = field(default_factory=dict)
    """Name of an nn.Embedding -> how its rows are spread."""
    heads: Mapping[str, Shard] = field(default_factory=dict)
    """Name of an nn.Linear whose outputs are logits -> how they are spread."""
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """Canonical parameter name -> how it is spread: the weights, and biases, of all these modules."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Name of a module -> why it is spread, or stays whole."""

    def without(self, model: nn.Module, reasons: Mapping[str, str]) -> Vocabulary:
        """Returns what is left when modules, and those tied with them, stay whole; `reasons` says why, by module."""
        why = {
            name: reason for first, reason in reasons.items() for name in _tied_with(model, model.get_submodule(first))
        }
        if not why:
            return self
        lost = {name for module in why for name in _parameters_of(model, module)}
        return Vocabulary(
            embeddings={name: shard for name, shard in self.embeddings.items() if name not in why},
            heads={name: shard for name, shard in self.heads.items() if name not in why},
            shards={name: shard for name, shard in self.shards.items() if name not in lost},
            reasons={**self.reasons, **why},
        )


def find_vocabulary(
    model: nn.Module,
    trace: Trace,
    tp: int,
    example: Mapping[str, Any] | None = None,
    reads: VocabularyReads | None = None,
) -> Vocabulary:
    """Returns how the vocabulary of `model` is spread over `tp` ranks: parts of it that differ by one entry at most.

    The embedding and the head are those that transformers names (`get_input_embeddings`, `get_output_embeddings`). In
    other models the embedding is the largest nn.Embedding before the blocks that looks up an argument of the model, and
    the head the last nn.Linear after them with as many outputs as that has rows. One forward on tensors without values
    (see `trace`) shows where they run and what else reads their weights. A vocabulary of fewer entries than the width
    of what is looked up stays whole: exchanging the result would cost more than the table.

    Args:
        example: as for `trace`.
        reads: what `watch_reads` returned of them; None: it is asked.
    Raises: TraceError when the forward cannot run on the example.
    """
    if tp == 1:
        return Vocabulary()
    reads = watch_reads(model, trace, example) if reads is None else reads
    names = {module: name for name, module in model.named_modules()}
    embedding = _named_by_transformers(model, "get_input_embeddings") or _largest_embedding(model, reads)
    head = _named_by_transformers(model, "get_output_embeddings")
    if head is None and isinstance(embedding, nn.Embedding):
        head = _last_linear(model, reads, embedding.num_embeddings)
    reasons: dict[str, str] = {}
    found: dict[str, Shard] = {}
    for module in (embedding, head):
        if module is None or module not in names or names[module] in reasons:
            continue
        together = _tied_with(model, module) or [names[module]]
        against = [text for one in together if (text := _against(one, model, reads, tp))]
        for name in together:
            reasons[name] = against[0] if against else _for(model.get_submodule(name), len(together) > 1)
        if not against:
            weight: Any = module.weight
            found.update(dict.fromkeys(together, Shard.even(0, weight.shape[0], tp)))
    parameters = {parameter: shard for name, shard in found.items() for parameter in _parameters_of(model, name)}
    kinds = {name: isinstance(model.get_submodule(name), nn.Embedding) for name in found}
    return Vocabulary(
        embeddings={name: shard for name, shard in found.items() if kinds[name]},
        heads={name: shard for name, shard in found.items() if not kinds[name]},
        shards=parameters,
        reasons=reasons,
    )


def _parameters_of(model: nn.Module, name: str) -> list[str]:
    """Returns the canonical names of a module's own parameters."""
    canonical = {alias: group[0] for group in tied_groups(model) for alias in group}
    own = (f"{name}.{one}" for one, _ in model.get_submodule(name).named_parameters(recurse=False))
    return [canonical.get(one, one) for one in own]


def _named_by_transformers(model: nn.Module, method: str) -> nn.Module | None:
    try:
        found = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def _largest_embedding(model: nn.Module, reads: VocabularyReads) -> nn.Module | None:
    modules = [model.get_submodule(name) for name in reads.looked_up or reads.before]
    return max((module for module in modules if isinstance(module, nn.Embedding)), key=_rows, default=None)


def _last_linear(model: nn.Module, reads: VocabularyReads, outputs: int) -> nn.Module | None:
    modules = [model.get_submodule(name) for name in reads.after]
    heads = [module for module in modules if isinstance(module, nn.Linear) and module.out_features == outputs]
    return heads[-1] if heads else None


def _rows(module: nn.Module) -> int:
    weight: Any = module.weight
    return int(weight.shape[0])


def _tied_with(model: nn.Module, module: nn.Module) -> list[str]:
    """Returns the names of all modules that hold the weight, or the bias, of `module` as their own parameter of the
    same name, its own among them."""
    return [
        name
        for name, other in model.named_modules()
        if any(other._parameters.get(own) is p for own, p in module._parameters.items() if p is not None)
        and (isinstance(other, (nn.Embedding, nn.Linear)) or "weight" in other._parameters)
    ]


def _against(name: str, model: nn.Module, reads: VocabularyReads, tp: int) -> str:
    """Returns why a module's entries cannot, or should not, be spread; an empty string when they can."""
    module = model.get_submodule(name)
    if not isinstance(module, (nn.Embedding, nn.Linear)):
        return f"'{name}', a {type(module).__name__}, is neither an nn.Embedding nor an nn.Linear"
    if module._parameters.get("weight") is None or set(module._parameters) - {"weight", "bias"} or module._modules:
        return f"'{name}' makes its weight out of others"
    rows, width = module.weight.shape
    if rows < max(width, 2 * tp):
        return f"{rows} entries are few beside a width of {width}: exchanging what is looked up would cost more"
    wrong = next(_wrong_use(name, module, reads), "")
    if wrong:
        return wrong
    others = next((reads.elsewhere[id(p)] for p in module._parameters.values() if id(p) in reads.elsewhere), None)
    return "" if others is None else f"its weights are read by '{others}', too"


def _wrong_use(name: str, module: nn.Embedding | nn.Linear, reads: VocabularyReads) -> Iterator[str]:
    if name in reads.within:
        yield f"'{name}' runs inside of a block"
    if isinstance(module, nn.Linear):
        if name in reads.before:
            yield f"'{name}' runs before the last block has ended"
        return
    if name in reads.after:
        yield f"'{name}' runs after the blocks"
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            yield f"'{name}' has {option}={getattr(module, option)}, for which it must be whole"


def _for(module: nn.Module, tied: bool) -> str:
    what = "embedding" if isinstance(module, nn.Embedding) else "output head"
    return f"{what} of {_rows(module)} entries" + (", tied" if tied else "")
