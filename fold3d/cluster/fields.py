"""What people and other programs wrote, read with checks: errors say where it stands, what it is and what it must be.

For JSON files and for numbers of the command line.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from fold3d.errors import ConfigError

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Field:
    """A value and where it stands. All methods raise ConfigError where it is not what they ask for."""

    value: Any
    path: str = ""
    """Where it stands in its file, such as `jobs[0].weight`; or the option of the command line that says it."""
    file: str = ""
    remedy: str = ""
    """What errors end with: what to do about a file that no person wrote."""

    @classmethod
    def load(cls, file: Path, what: str, remedy: str = "", *, optional: bool = False) -> Field:
        """Returns what is in a JSON file.

        Args:
            what: it is, such as `a workload`.
            optional: whether there need be no such file; what is returned then is absent.
        """
        try:
            return cls(json.loads(file.read_text(encoding="utf-8")), "", str(file), remedy)
        except (OSError, ValueError, RecursionError) as error:
            if optional and isinstance(error, FileNotFoundError):
                return cls(_ABSENT)
            raise ConfigError(f"{file} cannot be read as {what}: {error}{_after(remedy)}") from None

    @property
    def absent(self) -> bool:
        """Whether there is no such field, or no such file."""
        return self.value is _ABSENT

    def error(self, reason: str) -> ConfigError:
        """Returns the error that says where and why."""
        where = ": ".join(part for part in (self.file, self.path) if part)
        return ConfigError(f"{where} {reason}{_after(self.remedy)}")

    def wrong(self, wanted: str) -> ConfigError:
        """Returns the error that says what it must be."""
        said = "is missing" if self.absent else f"is {_shown(self.value)}"
        return self.error(f"{said}; it must be {wanted}")

    def __contains__(self, name: str) -> bool:
        return isinstance(self.value, dict) and name in self.value

    def at(self, name: str) -> Field:
        """Returns a field of an object; where the object has none, `default` of the methods below counts."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object: {...}")
        return replace(self, value=self.value.get(name, _ABSENT), path=f"{self.path}.{name}" if self.path else name)

    def known(self, *names: str) -> Field:
        """Returns it, an object whose fields have no other names than these."""
        if not isinstance(self.value, dict):
            raise self.wrong(f"an object with {', '.join(names)}")
        for name in self.value:
            if name not in names:
                raise self.error(f"has {shortened(name)}; known are {', '.join(names)}")
        return self

    def items(self) -> dict[str, Field]:
        """Returns the fields of an object by name; none where it is absent."""
        if self.absent:
            return {}
        if not isinstance(self.value, dict):
            raise self.wrong("an object: {...}")
        return {name: self.at(name) for name in self.value}

    def entries(self, count: int | None = None, example: str = "[...]") -> list[Field]:
        """Returns the entries of a list: `count` of them, if that is said; errors show an example."""
        if not isinstance(self.value, list) or count not in (None, len(self.value)):
            raise self.wrong(f"a list such as {example}" if count else "a list: [...]")
        return [replace(self, value=one, path=f"{self.path}[{number}]") for number, one in enumerate(self.value)]

    def text(self, default: str | None = None) -> str:
        """Returns a text."""
        if self.absent and default is not None:
            return default
        if not isinstance(self.value, str):
            raise self.wrong('a text: "..."')
        return self.value

    def one_of(self, names: tuple[str, ...], default: str | None = None) -> str:
        """Returns one of the names."""
        if self.absent and default is not None:
            return default
        if not isinstance(self.value, str) or self.value not in names:
            raise self.wrong(f"one of {', '.join(names)}" if names else "left out: there is none to choose from")
        return self.value

    def number(
        self,
        *,
        least: float = 0.0,
        above: float = -math.inf,
        most: float = math.inf,
        default: float | None = None,
        unit: str = "",
    ) -> float:
        """Returns a finite number.

        Args:
            least, most: bounds that it may reach.
            above: a bound that it may not reach.
            default: where it is absent.
            unit: such as `in seconds`, for the error.
        """
        if self.absent and default is not None:
            return default
        found = self._float()
        if not (math.isfinite(found) and least <= found <= most and found > above):
            low = f" above {above:g}" if above >= least else f" of {least:g} or more" if least > -math.inf else ""
            high = f"{' and' if low else ''} up to {most:g}" if most < math.inf else ""
            raise self.wrong(f"a finite number{low}{high}{unit and ', '}{unit}")
        return found

    def whole(self, *, least: int) -> int:
        """Returns a whole number, `least` or more."""
        found = self._float()
        if not (math.isfinite(found) and found == int(found) and found >= least):
            raise self.wrong(f"a whole number, {least} or more")
        return int(self.value)

    def _float(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            return math.nan
        try:
            return float(self.value)
        except OverflowError:
            return math.inf


def _after(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""


def _shown(value: Any) -> str:
    if isinstance(value, bool | None):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else shortened(value)
