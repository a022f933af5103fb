"""ShardDraws: random numbers that differ between shards inside a region, and agree outside of it."""

from __future__ import annotations

import torch

from fold3d import seeding
from fold3d._C import reseed, seed_inside


class ShardDraws:
    """Forks the generators of a device where a region begins, and puts them back where it ends.

    What a rank draws inside is a pure function of its place in the group and of the common state at the region's
    begin, from which one number is taken. So a region that backward computes again, under torch.utils.checkpoint,
    draws what it drew.
    """

    def __init__(self, rank: int) -> None:
        self._constant = seeding.constant_of(f"shard {rank}")
        self._saved: list[tuple[torch.Generator, torch.Tensor]] = []

    def fork(self, device: torch.device) -> None:
        """A region begins; without effect inside of one."""
        if self._saved:
            return
        seed = int(torch.randint(1 << 62, (1,), device="cpu"))
        generators = seeding.generators_of(device)
        self._saved = [(generator, generator.get_state()) for generator in generators]
        reseed(generators, seed_inside(seed, self._constant))

    def join(self) -> None:
        """The region has ended, or was left by an exception."""
        for generator, state in self._saved:
            generator.set_state(state)
        self._saved = []
