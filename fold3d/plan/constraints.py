"""Constraints: what the user has decided already. Names and numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.plan.strategy import Modes, Ranges, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """Settings that are not to be chosen, as in Strategy; None is free. `space.registry.check` looks at them."""

    segments: int | None = None
    ranges: Ranges | None = None
    """Segments follow from it."""
    schedule: str | None = None
    group_size: int | None = None
    dp_sync: str | None = None
    modes: Modes | None = None
    """Only with dp_sync="mixed"."""
    bucket_bytes: int | None = None
    settings: tuple[tuple[str, str], ...] = ()
    """Of the knobs without a field here: name and text form of the value. What is not named is free."""

    @staticmethod
    def of(strategy: Strategy, *, keeps_order: bool = True) -> Constraints:
        """Returns all that was decided, but for the order of gathers; with the order of micro-batches, or without."""
        return Constraints(
            ranges=strategy.ranges,
            schedule=strategy.schedule if keeps_order else None,
            group_size=strategy.group_size if keeps_order else None,
            bucket_bytes=strategy.bucket_bytes,
            dp_sync=strategy.dp_sync,
            modes=strategy.modes or None,
            settings=strategy.settings,
        )
