"""Recompute: which activations are computed again in the backward pass instead of kept, chunk by chunk. Text only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fold3d.errors import ConfigError

FORMS = (
    '"auto", "none", "full" (whole chunks), "blocks" (each block by itself), "blocks:2" (every second block), or names '
    'of modules inside of a block, such as "self_attn,mlp" or "attn.*"; for each chunk another one with "/" between '
    'them, such as "full/none"'
)
WORDS = ("auto", "none", "full", "blocks")
"""That are no names of modules."""
_FULL = {"none": False, "false": False, "no": False, "full": True, "true": True, "yes": True}


@dataclass(frozen=True, slots=True)
class Choice:
    """What one chunk computes again: nothing, where no field is set."""

    full: bool = False
    """All of it: its forward keeps what it was given, and no graph."""
    every: int = 0
    """Of the blocks of a stage every so many, by itself; 1: each."""
    patterns: tuple[str, ...] = ()
    """Modules inside of a block, by names relative to it or patterns of fnmatch."""

    @property
    def nothing(self) -> bool:
        """Whether everything is kept."""
        return self == Choice()

    def modules(self, names: Sequence[str]) -> list[str]:
        """Returns those of a block's modules that patterns name, of several inside of each other the outermost.

        Args:
            names: relative to the block, outer ones first.
        """
        chosen: list[str] = []
        for name in names:
            within = any(name.startswith(f"{outer}.") for outer in chosen)
            if not within and any(fnmatchcase(name, pattern) for pattern in self.patterns):
                chosen.append(name)
        return chosen

    def __str__(self) -> str:
        if self.full:
            return "full"
        if self.every:
            return "blocks" if self.every == 1 else f"blocks:{self.every}"
        return ",".join(self.patterns) or "none"


@dataclass(frozen=True, slots=True)
class Recompute:
    """One choice for all chunks, or one for each: earlier stages keep more micro-batches, so they may compute more
    again (Merak, section 5.2, stage-aware recomputation). `parse(str(recompute)) == recompute`."""

    choices: tuple[Choice, ...] = (Choice(),)

    @classmethod
    def parse(cls, value: object) -> Recompute:
        """Returns what a setting says: text, or True for "full" and False for "none".

        Raises: ConfigError, with the forms, for anything else.
        """
        try:
            if not isinstance(value, (str, bool)):
                raise ValueError(f"must be {FORMS}")
            return cls.read(str(value))
        except ValueError as error:
            raise ConfigError(f"recompute={value!r}: {error}") from None

    @classmethod
    def read(cls, text: str) -> Recompute:
        """Returns the value with this text form. Raises: ValueError saying what is wrong with it."""
        return cls(tuple(_choice(part.strip()) for part in text.split("/")))

    @property
    def nothing(self) -> bool:
        """Whether every chunk keeps everything."""
        return all(choice.nothing for choice in self.choices)

    def of_chunks(self, number: int) -> tuple[Choice, ...]:
        """Returns the choice of each of so many chunks. Raises: ConfigError when it is said of another number."""
        if len(self.choices) not in (1, number):
            raise ConfigError(
                f"recompute={str(self)!r} is said of {len(self.choices)} chunks, and the model is cut into {number} "
                "(pp * segments): say it of each, or once for all"
            )
        return self.choices * number if len(self.choices) == 1 else self.choices

    def without_graph(self, number: int) -> list[bool]:
        """Returns of each of so many chunks whether it keeps no graph between forward and backward, as `schedule.lower`
        takes it.

        A model that is one chunk recomputes block by block instead: its backward follows its forward.

        Raises: ConfigError as `of_chunks`.
        """
        return [number > 1 and choice.full for choice in self.of_chunks(number)]

    def __str__(self) -> str:
        return "/".join(map(str, self.choices))


NOTHING = Recompute()


def _choice(text: str) -> Choice:
    full = _FULL.get(text.lower())
    if full is not None:
        return Choice(full=full)
    if text == "blocks":
        return Choice(every=1)
    if text.startswith("blocks:"):
        number = text.removeprefix("blocks:")
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{text!r} must say every how many blocks, such as blocks:2")
        return Choice(every=int(number))
    patterns = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    reserved = [one for one in patterns if one in ("", "auto", "blocks") or ":" in one or one.lower() in _FULL]
    if reserved:
        raise ValueError(f"{reserved[0]!r} names no module; it must be {FORMS}")
    return Choice(patterns=patterns)
