"""InnerParts: what a block and modules inside of it return, for those to whom the model or hooks hand it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fold3d.errors import ConfigError
from fold3d.sharding.split import InnerResult, Path
from fold3d.tensor_parallel.region import RegionOps
from fold3d.tensor_parallel.results.lazy_whole import LazyWhole
from fold3d.tensor_parallel.results.parts import Parts, PutTogether
from fold3d.tensor_parallel.sequence.block_sequence import BlockSequence
from fold3d.tensor_parallel.slices import gather_part, paths_of, replace_leaf
from fold3d.trace.wrappers import wrap


class InnerParts:
    """Has a block return whole what it returns beside what later blocks read (`LazyWhole`), and notes the parts that
    modules inside of it return while there are hooks on them: transformers puts them on when attention weights or
    routers' logits are asked for first. What a hook of the user's sees there stays a part."""

    def __init__(self, block: nn.Module, name: str, rank: int, ops: RegionOps, sequence: BlockSequence | None) -> None:
        """Args:
        name: of the block in the model.
        sequence: what the block does with parts of the sequence; None: every rank has all of it.
        """
        self.parts = Parts()
        self._block, self._name, self._rank, self._ops, self._sequence = block, name, rank, ops, sequence

    def watch(self, result: InnerResult) -> Callable[[], None]:
        """Begins to note what a module returns; returns what ends that."""
        module = self._block.get_submodule(result.module)
        ways = dict.fromkeys(result.whole) | self._ways(result)
        unknown = partial(self._fail, f"{self._name}.{result.module}".rstrip("."))
        original, is_block = module.forward, module is self._block

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if torch._C._current_graph_task_id() != -1:  # computed again: nobody is handed it
                return output
            if is_block:
                return self._lazily(output, ways, unknown)
            if module._forward_hooks:
                self._note(output, ways, unknown)
            return output

        return wrap(module, forward)

    def _ways(self, result: InnerResult) -> dict[Path, PutTogether | None]:
        ways: dict[Path, PutTogether | None] = {
            one.path: partial(gather_part, one=one, rank=self._rank, ops=self._ops) for one in result.slices
        }
        if self._sequence is not None:
            ways |= dict.fromkeys(result.rows, self._sequence.whole)
            ways |= dict.fromkeys(result.folded, self._sequence.whole_folded)
        return ways

    def _lazily(self, output: Any, ways: Mapping[Path, PutTogether | None], unknown: PutTogether) -> Any:
        for path, _ in paths_of(output):
            whole = ways.get(path, unknown)
            if whole is not None:
                output = replace_leaf(output, path, partial(LazyWhole.of, put_together=whole))
        return output

    def _note(self, output: Any, ways: Mapping[Path, PutTogether | None], unknown: PutTogether) -> None:
        for path, leaf in paths_of(output):
            whole = ways.get(path, unknown)
            if whole is not None:
                self.parts.note(leaf, whole)

    def _fail(self, module: str, part: Tensor) -> NoReturn:
        shared = self._sequence is not None
        raise ConfigError(
            f"the model returns what '{module}' computed, and with tp={self._ops.size} this rank has a part of it "
            f"({'x'.join(map(str, part.shape))}) of which it is not known how it makes up the whole. Have the "
            "model's configuration ask for it before training begins (output_attentions=True, say), "
            f"{'set sequence_parallel=False, ' if shared else ''}leave the layers whole with "
            "tp_plan={NAME: 'replicate'}, or set tp=1"
        )
