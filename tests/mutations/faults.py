"""The faults of faults.toml, and how one gets into its file and out of it again."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The tree that this file is in."""


class FaultError(Exception):
    """A fault does not fit its file, or the tree is not ready for one."""


@dataclass(frozen=True)
class Fault:
    """One line of one file, and a wrong one in its place: whole lines, with their indentation."""

    name: str
    file: str  # from the root of the tree
    old: str
    new: str
    why: str  # what goes wrong, and in which setting

    def apply(self, root: Path = ROOT) -> None:
        """Puts the wrong line in. Raises: FaultError unless the right one is there once, and the wrong one is not."""
        self._exchange(root / self.file, self.old, self.new)

    def revert(self, root: Path = ROOT) -> None:
        """Puts the right line in. Raises: FaultError unless the wrong one is there once, and the right one is not."""
        self._exchange(root / self.file, self.new, self.old)

    @contextmanager
    def applied(self, root: Path = ROOT) -> Iterator[None]:
        """The file has the fault within, and afterwards the bytes that it had before, whatever happened."""
        before = (root / self.file).read_bytes()
        try:
            self.apply(root)
            yield
        finally:
            _write(root / self.file, before)

    def _exchange(self, path: Path, old: str, new: str) -> None:
        lines = path.read_bytes().decode().split("\n")  # read_text() would change line ends
        if lines.count(old) != 1 or new in lines:
            counts = f"{lines.count(old)} times {old.strip()!r} and {lines.count(new)} times {new.strip()!r}"
            raise FaultError(f"{self.name}: {self.file} has {counts}, where 1 and 0 are needed")
        lines[lines.index(old)] = new
        _write(path, "\n".join(lines).encode())


def load() -> list[Fault]:
    """Returns all faults, in the order of the file."""
    return [Fault(**entry) for entry in tomllib.loads((ROOT / "tests/mutations/faults.toml").read_text())["fault"]]


def _write(path: Path, data: bytes) -> None:
    """Python takes a compiled file for current where second and size of its source are the same, so it is removed."""
    path.write_bytes(data)
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
