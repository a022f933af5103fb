"""ChunkRun: where the model's forward is that runs as one chunk, and what it has received and hands on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fold3d import seeding
from fold3d._C import ForwardCursor
from fold3d.stage.blocks.hooked_modules import BlockRun
from fold3d.stage.cargo import Borders
from fold3d.tensor_parallel.checkpoints import group_of_checkpoint


class ChunkExit(BaseException):
    """Ends the model's forward after the chunk's last block. No Exception, so that no `except Exception`
    swallows it."""

    def __init__(self, owner: object) -> None:
        super().__init__("the chunk is done")
        self.owner = owner


class ChunkRun(ForwardCursor):
    """One run of the model's forward as a chunk.

    Args:
        borders: what crosses them in the form in which the model is called.
    Raises: SplitError when another number of tensors was received than crosses the border before the chunk.
    """

    def __init__(
        self,
        blocks: tuple[int, int],
        last: bool,
        device: torch.device,
        seed: int | None,
        constants: Sequence[int],
        received: Sequence[Tensor],
        borders: Borders,
    ) -> None:
        lo, hi = blocks
        self.generators = [] if seed is None else seeding.generators_of(device)
        super().__init__(lo, seed, self.generators, constants)
        self.mark = object()  # tells it from other runs without keeping it
        self.lo = lo
        self.hi = hi
        self.last = last
        self.device = device
        self.received = received
        self.borders = borders
        self.cargo = borders.cargo(lo, hi, received, leaves=not last)
        self.alike_from, self.alike = borders.alike(lo, self.cargo)
        self.skip_from(self.alike_from)
        self.leaving: list[Tensor] | None = None
        self.block: BlockRun | None = None
        self._calls: dict[str, int] = {}
        self.outer_checkpoint = group_of_checkpoint()
        self.checkpoint: object = None

    def call_of(self, module: str) -> int:
        """Returns how often the module was called before by the model's forward, and counts this call."""
        call = self._calls[module] = self._calls.get(module, -1) + 1
        return call

    def begin_block(self, block: BlockRun) -> None:
        """A block of the chunk begins."""
        self.block = block

    def leave(self, leaving: list[Tensor]) -> bool:
        """The chunk's last block is done; returns whether the forward may be ended right here."""
        self.leaving = leaving
        self.checkpoint = group_of_checkpoint()
        return self.checkpoint is self.outer_checkpoint
