"""Constraints: what the user has decided already. Names and numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.plan.strategy import Modes, Ranges


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
