"""ShardDraws: random numbers that differ between shards inside a region, and agree outside of it."""

from __future__ import annotations

import logging

import torch

from fold3d import seeding
from fold3d._C import reseed, seed_inside

logger = logging.getLogger(__name__)

_warned: set[str] = set()


class ShardDraws:
    """Forks the generators of a device where a region begins, and puts them back where it ends.

    What a rank draws inside is a pure function of its place in the group, of the region and of the common state at the
    region's begin. So a region that backward computes again, under torch.utils.checkpoint, draws what it drew; and
    where nothing is drawn inside, what is drawn outside is the same as without shards.
    """

    def __init__(self, rank: int, block: str = "") -> None:
        """Args:
        block: the class of the block, to say once that its ranks draw masks of their own; nothing is said without it.
        """
        self._rank, self._block = rank, block
        self._saved: list[tuple[torch.Generator, torch.Tensor]] = []
        self._begun: list[torch.Tensor] = []

    def fork(self, device: torch.device, region: int) -> None:
        """Region number `region` of a block begins; without effect inside of one."""
        if self._saved:
            return
        generators = seeding.generators_of(device)
        self._saved = [(generator, generator.get_state()) for generator in generators]
        seed = int(torch.randint(1 << 62, (1,), device="cpu"))  # as if it were not drawn, once the region has ended
        reseed(generators, seed_inside(seed, seeding.constant_of(f"shard {self._rank} of region {region}")))
        if self._block and self._block not in _warned:
            self._begun = [generator.get_state() for generator in generators]

    def join(self) -> None:
        """The region has ended, or was left by an exception."""
        for (generator, _), begun in zip(self._saved, self._begun, strict=False):
            if not torch.equal(generator.get_state(), begun) and self._block not in _warned:
                _warned.add(self._block)
                logger.warning(
                    "tp: each rank draws random numbers of its own for its share of a %s, because it could not be "
                    "found out which part of the whole block's they are. Its dropout is as strong, but its masks are "
                    "not those of tp=1.",
                    self._block,
                )
        for generator, state in self._saved:
            generator.set_state(state)
        self._saved, self._begun = [], []
