"""CheckpointFolder: one checkpoint is written beside its final place and moved there when it is complete.

output_dir/
  checkpoint-100/      complete, or not there at all
  tmp-checkpoint-200/  being written; a leftover of a killed run is removed at the next start
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from fold3d.checkpoint import manifest
from fold3d.errors import CheckpointError

logger = logging.getLogger(__name__)

PREFIX = "tmp-"
# The stock rotation and get_last_checkpoint look for "checkpoint-*": temporary names must not match it.
_FINAL = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = re.compile(re.escape(PREFIX) + r"(old-)?checkpoint-\d+")


class CheckpointFolder:
    """The place of one checkpoint. Only rank 0 calls begin, commit and discard."""

    def __init__(self, final: str | Path) -> None:
        self.final = Path(final)
        self.temporary = self.final.with_name(PREFIX + self.final.name)
        self._mark = self.temporary / f".of-{secrets.token_hex(8)}"

    def begin(self) -> None:
        """Makes an empty temporary folder; what an interrupted save left there is removed."""
        self.discard()
        self.temporary.mkdir(parents=True)
        self._mark.touch()

    def check(self) -> None:
        """Raises CheckpointError where the temporary folder is not the one that `begin` has made."""
        if not self._mark.exists():
            raise CheckpointError(
                f"{self.temporary} has been removed, or is another training's: two trainings save into "
                f"{self.final.parent} at once; give each an output_dir of its own"
            )

    def commit(self) -> None:
        """Moves the temporary folder to its final name, all of its bytes on disk first.

        A checkpoint that already has the final name (a run repeated in the same output_dir) is replaced.

        Raises: CheckpointError, see `check`.
        """
        self.check()
        self._mark.unlink()
        for path in sorted(self.temporary.rglob("*")):
            if path.is_file():
                _flush(path)
        _flush(self.temporary)
        old = self.final.with_name(f"{PREFIX}old-{self.final.name}")
        if os.path.lexists(self.final):
            with contextlib.suppress(OSError):
                _remove(old)
            self.final.rename(old)
        self.temporary.rename(self.final)
        _flush(self.final.parent)
        with contextlib.suppress(OSError):
            _remove(old)

    def discard(self) -> None:
        """Removes the temporary folder, if there is one."""
        _remove(self.temporary)


def last_committed(output_dir: str | Path) -> Path | None:
    """Returns the newest checkpoint in `output_dir` whose files are there and whole; None: there is none."""
    named = [(int(m.group(1)), path) for path in Path(output_dir).glob("*") if (m := _FINAL.fullmatch(path.name))]
    for _, path in sorted(named, reverse=True):
        try:
            manifest.check(path)
            manifest.step_index(path)
        except CheckpointError as error:
            logger.warning("%s; it is passed over for an older one", error)
        else:
            return path
    return None


def remove_stale(output_dir: str | Path) -> list[Path]:
    """Removes what interrupted saves left in `output_dir`; returns those paths. Rank 0 calls it at the start.

    A folder set aside while its successor was moved in is put back when the successor never arrived.
    """
    removed = []
    for path in sorted(Path(output_dir).glob(f"{PREFIX}*")):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        final = path.with_name(path.name.removeprefix(f"{PREFIX}old-"))
        if match.group(1) and not final.exists():
            path.rename(final)
            continue
        logger.warning("removing %s, left by an interrupted save", path)
        _remove(path)
        removed.append(path)
    return removed


def _remove(path: Path) -> None:
    """Removes a folder, or a link to one, if it is there."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _flush(path: Path) -> None:
    """Returns when the file, or the entries of the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
