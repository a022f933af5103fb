"""Offload: which stashes leave the device between their forward and their backward. Text only."""

from __future__ import annotations

from dataclasses import dataclass

from fold3d.errors import ConfigError

OFFLOAD = ("none", "boundaries", "activations")
"""What may leave the device between forward and backward."""
FORMS = (
    f"must be one of auto, {', '.join(OFFLOAD)}, of which the last two may name a share of the micro-batches, such "
    "as activations:50%"
)


@dataclass(frozen=True, slots=True)
class Offload:
    """What leaves, and of how many micro-batches. `read(str(offload)) == offload`."""

    what: str = OFFLOAD[0]
    """One of OFFLOAD."""
    percent: int = 100
    """Of the micro-batches, spread evenly over them; the stashes of the others stay. 1 to 100."""

    @classmethod
    def parse(cls, value: object) -> Offload:
        """Returns what a setting says. Raises: ConfigError, with the forms, for anything but such a text."""
        try:
            if not isinstance(value, str):
                raise ValueError(FORMS)
            return cls.read(value)
        except ValueError as error:
            raise ConfigError(f"offload={value!r}: {error}") from None

    @classmethod
    def read(cls, text: str) -> Offload:
        """Returns the value with this text form. Raises: ValueError saying what is wrong with it."""
        what, colon, share = text.partition(":")
        number = share.removesuffix("%")
        if what not in OFFLOAD or (colon and (what == OFFLOAD[0] or number == share or not _is_percent(number))):
            raise ValueError(FORMS)
        return cls(what, int(number) if colon else 100)

    @property
    def nothing(self) -> bool:
        """Whether everything stays."""
        return self.what == OFFLOAD[0]

    @property
    def share(self) -> float:
        """Of the micro-batches, as `schedule.lower` takes it."""
        return self.percent / 100

    def __str__(self) -> str:
        return self.what if self.percent == 100 else f"{self.what}:{self.percent}%"


NOTHING = Offload()


def _is_percent(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 1 <= int(text) <= 100
