"""VocabularyReads: where embeddings and linear layers around a model's blocks run, and who else reads their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

from fold3d.trace.capture import Shadow, example_for
from fold3d.trace.model_trace import Trace
from fold3d.trace.repeated.twins import Twins


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
        self._arguments: set[int] = set()
        self.elsewhere: dict[int, str] = {}
        self._running: list[tuple[str, nn.Module]] = []
        self._blocks = frozenset(blocks)
        self._blocks_left = set(self._blocks)
        self._begun = False
        self._originals: dict[int, tuple[int, int]] = {}
        originals = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in shadow.named_parameters(remove_duplicate=False):
            self._originals[_key(parameter)] = id(originals[name]), id(parameter)
        for name, module in shadow.named_modules():
            module.register_forward_pre_hook(self._enter(name), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
            if not self._running:
                self._arguments.update(_key(tensor) for tensor in tensors)
            in_block = any(running in self._blocks for running, _ in self._running)
            self._running.append((name, module))
            if name in self._blocks:
                self._begun = True
            elif isinstance(module, (nn.Embedding, nn.Linear)) and not in_block:
                seen = self.before if not self._begun else self.within if self._blocks_left else self.after
                if name not in seen:
                    seen.append(name)
                if seen is self.before and any(_key(tensor) in self._arguments for tensor in tensors):
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
            if isinstance(leaf, Tensor) and (known := self._originals.get(_key(leaf))) is not None:
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
    shadow = Shadow(model, given)
    if not trace.direct and not _blocks_share(trace):
        Twins(shadow.model, trace, given)
    reads = VocabularyReads(model, shadow.model, trace.modules)
    shadow.run(reads)
    return reads


def _blocks_share(trace: Trace) -> bool:
    """Whether a weight in a block has another name, too."""
    insides = tuple(f"{block}." for block in trace.modules)
    return any(name.startswith(insides) for group in trace.tied for name in group)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
