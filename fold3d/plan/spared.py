"""Spared: what a plan does for less memory on the device, at the cost of time."""

from __future__ import annotations

from dataclasses import dataclass, field

from fold3d.offload import Offload
from fold3d.recompute import Choice, Recompute


@dataclass(frozen=True, slots=True)
class Spared:
    """What is computed again instead of kept, and what leaves the device between forward and backward: the values of
    the knobs `recompute` and `offload`."""

    recompute: Recompute = field(default_factory=Recompute)
    offload: Offload = field(default_factory=Offload)

    @staticmethod
    def of(settings: tuple[tuple[str, str], ...]) -> Spared:
        """Returns what the settings of a strategy say. Raises: ValueError for text that is no value."""
        texts = dict(settings)
        return Spared(Recompute.read(texts.get("recompute", "none")), Offload.read(texts.get("offload", "none")))

    def into(self, settings: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Returns the settings with this in place of what they said."""
        mine = {"recompute": str(self.recompute), "offload": str(self.offload)}
        return tuple((name, mine.get(name, text)) for name, text in settings)

    @property
    def nothing(self) -> bool:
        """Whether all is kept on the device."""
        return self.recompute.nothing and self.offload.nothing

    def offloaded(self, chunks: int) -> list[bool]:
        """Returns, of every chunk, whether its stashes leave the device, of the share of micro-batches that `offload`
        names; empty where none does.

        Raises: ConfigError as Recompute.of_chunks.
        """
        if self.offload.what == "activations":
            return [True] * chunks
        if self.offload.what != "boundaries":
            return []
        moves = [keeps_boundaries(choice) for choice in self.recompute.of_chunks(chunks)]
        return moves if any(moves) else []

    def __str__(self) -> str:
        parts = {"recompute": str(self.recompute), "offload": str(self.offload)}
        return ", ".join(f'{name}="{text}"' for name, text in parts.items() if text != "none")


NOTHING = Spared()


def keeps_boundaries(choice: Choice) -> bool:
    """Returns whether a chunk keeps nothing but what it, or each of its blocks, was given."""
    return choice.full or choice.every == 1
