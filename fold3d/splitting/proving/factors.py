"""Factors: weights of low rank in the place of large ones, so that a proof at full width takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fold3d.sharding.shard import Shard
from fold3d.splitting.probing.sites import Site, SiteMode

_Difference = tuple[int, str, Tensor | None, Tensor | None]
RANK = 8
_LARGE = 1 << 20
"""Elements of a weight that has factors."""


@dataclass(slots=True)
class _Pair:
    """A weight as `outputs` times the transposed `inputs`; both [channels, RANK]."""

    outputs: Tensor
    inputs: Tensor
    site: Site


class Factors:
    """Computes matrix products with large weights from two thin ones.

    What is to be proved is which channels a rank has, what is summed, and what happens between products: none of it
    depends on the rank of a weight. A part of a weight's output channels is a part of one factor, a part of its input
    channels one of the other; their gradients are compared in the place of the weight's. All experts have the same.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, str], _Pair] = {}
        self._sizes: dict[str, Site] = {}

    @staticmethod
    def candidates(block: nn.Module, shards: Mapping[str, Shard]) -> list[str]:
        """Returns the weights of a block that are large enough; those of which ranks hold overlapping parts stay."""
        return [
            name
            for name, parameter in block.named_parameters()
            if parameter.dim() > 1 and parameter.numel() > _LARGE and not (name in shards and shards[name].overlaps)
        ]

    @property
    def used(self) -> set[str]:
        """Weights of which products have been made."""
        return {name for _, name in self._pairs}

    def mode(self, owner: int, parameters: Iterable[tuple[str, nn.Parameter]], shards: Mapping[str, Shard]) -> SiteMode:
        """Returns a mode in which products with these parameters are made from factors.

        Args:
            owner: -1 is the whole block, else the rank that has these parameters.
        """
        return self.modes([(owner, name, parameter) for name, parameter in parameters], shards)

    def modes(self, owned: Iterable[tuple[int, str, nn.Parameter]], shards: Mapping[str, Shard]) -> SiteMode:
        """The same for parameters of several owners, given as (owner, name, parameter)."""
        return SiteMode(
            [(f"{owner}/{name}", parameter) for owner, name, parameter in owned],
            lambda site, x, shape: self._product(site, x, shape, shards),
        )

    def differences(self, shards: Mapping[str, Shard], ranks: int) -> Iterator[_Difference]:
        """Yields (rank, weight, found, expected) for each gradient of a factor."""
        for name in sorted(self.used):
            whole = self._pairs[-1, name]
            pairs = [self._pairs[rank, name] for rank in range(ranks)]
            shard = shards.get(name)
            by_outputs = shard is not None and shard.dim == whole.site.out_dim
            for is_outputs in (True, False):
                expected = (whole.outputs if is_outputs else whole.inputs).grad
                found = [(pair.outputs if is_outputs else pair.inputs).grad for pair in pairs]
                for rank in range(ranks):
                    if shard is None:
                        yield rank, name, found[rank], expected
                    elif by_outputs == is_outputs:
                        # Ranks that hold the same channels may have shares of their gradient.
                        others = shard.holders(rank) if shard.summed else (rank,)
                        part = None if expected is None else Shard(0, shard.size, shard.parts).take(expected, rank)
                        yield rank, name, _sum(found[other] for other in others), part
                    else:
                        yield rank, name, _sum(found), expected

    def _product(self, site: Site, x: Tensor, shape: list[int], shards: Mapping[str, Shard]) -> Tensor:
        owner, _, name = site.weight.partition("/")
        key = (int(owner), name)
        if key not in self._pairs:
            self._pairs[key] = self._pair(int(owner), name, site, shards)
        pair = self._pairs[key]
        return torch.matmul(torch.matmul(x, pair.inputs), pair.outputs.T).expand(shape)

    def _pair(self, owner: int, name: str, site: Site, shards: Mapping[str, Shard]) -> _Pair:
        if owner < 0:
            draw = torch.Generator().manual_seed(sum(map(ord, name)))
            outputs = torch.randn(site.outputs, RANK, dtype=torch.float64, generator=draw) / RANK**0.5
            inputs = torch.randn(site.inputs, RANK, dtype=torch.float64, generator=draw) / site.inputs**0.5
            return _Pair(outputs.requires_grad_(), inputs.requires_grad_(), site)
        whole, shard = self._pairs[-1, name], shards.get(name)
        outputs, inputs = whole.outputs.detach(), whole.inputs.detach()
        if shard is not None:
            rows = Shard(0, shard.size, shard.parts)
            if shard.dim == whole.site.out_dim:
                outputs = rows.take(outputs, owner)
            else:
                inputs = rows.take(inputs, owner)
        return _Pair(outputs.clone().requires_grad_(), inputs.clone().requires_grad_(), site)


def _sum(found: Iterable[Tensor | None]) -> Tensor | None:
    parts = [part for part in found if part is not None]
    return torch.stack(parts).sum(0) if parts else None
