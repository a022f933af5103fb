"""Strategy: everything that was decided about a run, one value with a text form; Constraints: what the user has decided
already. Names and numbers only.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path

from fold3d.config import DEFAULT_BUCKET_BYTES, DP_SYNC
from fold3d.errors import ConfigError
from fold3d.topology import num_segments

Ranges = tuple[tuple[int, int], ...]
"""Blocks [first, end) of every chunk."""
Modes = tuple[tuple[str, ...], ...]
"""Per stage: the way of DP.sync of each bucket, in forward order."""
Orders = tuple[tuple[int, ...], ...]
"""Per stage: its early buckets (numbers in forward order) in the order of their gathers."""
MIXED = "mixed"
_MOST_BUCKETS = 1 << 20
"""Of a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """All decisions about a run: mesh, cut, schedule and DP.sync. The same on every rank.

    `str(strategy)` is the text form that `fold3d plan` prints and the setting `strategy` takes;
    `parse(str(strategy)) == strategy`.

    Raises: ConfigError for values that contradict each other.
    """

    dp: int
    """Replicas."""
    pp: int
    """Stages."""
    tp: int = 1
    """Ranks of a tensor-parallel group."""
    micro_batches: int
    """Micro-batches per step and replica."""
    ranges: Ranges
    """Blocks [first, end) of each chunk, from the model's first chunk to its last; ((0, 0),) if no blocks are known."""
    schedule: str
    """Name of a schedule, or path of a CSV file."""
    group_size: int | None = None
    """N. None: the schedule does not use it, or uses its default."""
    dp_sync: str = "early"
    """"early", "zero1" or "serial" for all buckets, or "mixed"."""
    modes: Modes = ()
    """With "mixed": per stage, "early" or "zero1" of each bucket, in the order of the forward pass. Else empty."""
    gather_order: Orders = ()
    """Per stage, the numbers of its early buckets in the order of their gathers. Empty: the order of the forward
    pass."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    """Least bytes of a bucket; 0: a bucket per layer."""
    settings: tuple[tuple[str, str], ...] = ()
    """Other settings, such as recompute and offload: name and value as text, in the order of the planner's list."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "micro_batches", "group_size", "bucket_bytes"):
            value, least = getattr(self, name), 0 if name == "bucket_bytes" else 1
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}: must be at least {least}")
        ends = [0, *(end for _, end in self.ranges)]
        if [first for first, _ in self.ranges] != ends[:-1] or ends != sorted(ends):
            raise ConfigError(f"blocks {self.ranges!r}: each chunk begins where the one before it ends, the first at 0")
        differ = len({mode for stage in self.modes for mode in stage}) > 1
        if self.dp_sync not in (*DP_SYNC, MIXED) or (self.dp_sync == MIXED) != differ or bool(self.modes) != differ:
            raise ConfigError(f"dp_sync={self.dp_sync!r}, modes={self.modes!r}: modes belong to {MIXED!r}, and differ")
        if self.segments * self.pp != len(self.ranges):
            raise ConfigError(f"{len(self.ranges)} chunks cannot be spread over pp={self.pp} stages evenly")
        for name, per_stage in (("modes", self.modes), ("gather_order", self.gather_order)):
            if per_stage and len(per_stage) != self.pp:
                raise ConfigError(f"{name} is for {len(per_stage)} stages, and there are {self.pp}")
        if not {mode for stage in self.modes for mode in stage} <= {"early", "zero1"}:
            raise ConfigError(f"modes={self.modes!r}: a bucket's way is 'early' or 'zero1'")
        if any(len(set(stage)) < len(stage) or min(stage, default=0) < 0 for stage in self.gather_order):
            raise ConfigError(f"gather_order={self.gather_order!r}: a stage gathers each of its buckets once")

    @property
    def segments(self) -> int:
        """Number of segments of the model."""
        return num_segments(len(self.ranges), self.pp)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole model: segments * pp."""
        return len(self.ranges)

    @property
    def name(self) -> str:
        """The strategy in words, as in the planner's table."""
        return name_of(self.segments, self.schedule, self.group_size, self.dp_sync if self.dp > 1 else None)

    def modes_of(self, stage: int, buckets: int) -> tuple[str, ...]:
        """Returns the way of DP.sync of each of a stage's buckets.

        Args:
            buckets: their number.
        """
        return self.modes[stage] if self.modes else (self.dp_sync,) * buckets

    def gathers_of(self, stage: int, buckets: int) -> tuple[int, ...]:
        """Returns the numbers of a stage's early buckets in the order of their gathers.

        Args:
            buckets: number of the stage's buckets.
        """
        if self.gather_order:
            return self.gather_order[stage]
        return tuple(number for number, mode in enumerate(self.modes_of(stage, buckets)) if mode == "early")

    def __str__(self) -> str:
        """Returns `name=value` words for a shell."""
        words: dict[str, object] = {"dp": self.dp}
        if self.tp > 1:
            words["tp"] = self.tp
        words |= {"pp": self.pp, "micro_batches": self.micro_batches}
        chunks = [f"{first}-{end}" for first, end in self.ranges]
        words["segments"] = self.segments
        words["blocks"] = "/".join(",".join(chunks[k : k + self.pp]) for k in range(0, len(chunks), self.pp))
        words["schedule"] = self.schedule
        if self.group_size is not None:
            words["group_size"] = self.group_size
        words["dp_sync"] = "/".join(_runs(stage) for stage in self.modes) if self.modes else self.dp_sync
        if self.gather_order:
            words["gather_order"] = "/".join(",".join(map(str, stage)) for stage in self.gather_order)
        words["bucket_bytes"] = self.bucket_bytes
        words |= dict(self.settings)
        return shlex.join(f"{name}={value}" for name, value in words.items())


def parse(text: str) -> Strategy:
    """Returns the strategy with this text form. Raises: ConfigError naming the word that is wrong.

    Settings after `bucket_bytes` are not checked here; `plan.space.registry.check` does that.
    """
    try:
        given = shlex.split(text)
        words = dict(word.split("=", 1) for word in given)
    except ValueError:
        raise ConfigError(f"{text!r} is not a strategy: it has words of the form name=value") from None
    modes: Modes = ()
    try:
        if "*" in words.get("dp_sync", ""):
            words["dp_sync"], modes = MIXED, tuple(_parse_runs(stage) for stage in words["dp_sync"].split("/"))
        chunks = words.pop("blocks").replace("/", ",").split(",")
        segments = int(words.pop("segments"))
        order = words.pop("gather_order", None)
        made = Strategy(
            dp=int(words.pop("dp")),
            tp=int(words.pop("tp", "1")),
            pp=int(words.pop("pp")),
            micro_batches=int(words.pop("micro_batches")),
            ranges=tuple((int(first), int(end)) for first, end in (chunk.split("-") for chunk in chunks)),
            schedule=words.pop("schedule"),
            group_size=int(words.pop("group_size")) if "group_size" in words else None,
            dp_sync=words.pop("dp_sync"),
            modes=modes,
            gather_order=() if order is None else tuple(_parse_numbers(stage) for stage in order.split("/")),
            bucket_bytes=int(words.pop("bucket_bytes")),
            settings=tuple(words.items()),
        )
    except KeyError as missing:
        raise ConfigError(f"{text!r} is not a strategy: {missing.args[0]} is missing") from None
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a strategy: {error}") from None
    if made.segments != segments:
        raise ConfigError(f"segments={segments}, but blocks has {made.num_chunks} chunks for pp={made.pp} stages")
    expected = shlex.split(str(made))
    if given != expected:  # said twice, misspelt, in another place: it would be passed over
        wrong = next(word for word, other in zip_longest(given, expected) if word != other)
        raise ConfigError(f"{text!r} is not a strategy: {wrong!r} is not what stands there in {str(made)!r}")
    return made


_PRINTED = "strategy: "
"""Before the text form in what `fold3d plan` prints."""


def given(text: str) -> Strategy:
    """Returns the strategy of a text form, or of a file with one: alone, or with all else that `fold3d plan` prints.

    Raises: ConfigError for a file that cannot be read or has none, and as `parse`.
    """
    if text.lstrip().startswith(("dp=", _PRINTED)):
        return parse(text.strip().removeprefix(_PRINTED))
    try:
        content = Path(text).expanduser().read_text(encoding="utf-8").strip()
        found = json.loads(content).get("strategy") if content.startswith("{") else None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"strategy={text!r}: must be what `fold3d plan` prints behind {_PRINTED!r}, or a file with it ({error})"
        ) from None
    lines = [line.strip() for line in content.splitlines()]
    found = found or next((line for line in lines if line.startswith(_PRINTED)), content)
    return parse(str(found).removeprefix(_PRINTED))


def name_of(segments: int, schedule: str, group_size: int | None, dp_sync: str | None) -> str:
    """Returns settings in words; `dp_sync` where there is any."""
    number = "1 segment" if segments == 1 else f"{segments} segments"
    order = f"{schedule}, N={group_size}" if group_size else schedule
    return f"{number}, {order}" + (f", DP.sync {dp_sync}" if dp_sync else "")


def _runs(stage: Sequence[str]) -> str:
    return ",".join(f"{mode}*{len(list(run))}" for mode, run in groupby(stage))


def _parse_runs(text: str) -> tuple[str, ...]:
    runs = [run.split("*") for run in text.split(",")] if text else []
    counts = [int(count) for _, count in runs]
    if sum(counts) > _MOST_BUCKETS:  # a damaged number must not fill the memory
        raise ValueError(f"dp_sync has ways for {sum(counts)} buckets, more than {_MOST_BUCKETS}")
    return tuple(mode for (mode, _), count in zip(runs, counts, strict=True) for _ in range(count))


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


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
