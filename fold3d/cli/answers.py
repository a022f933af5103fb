"""Answers of commands that would be the same again, kept in files: found without loading torch or the model.

A file holds what a command printed. It is named by everything that decides that: the command's options, the model's
configuration, and the versions and files of fold3d, torch, transformers and Python. Files are written whole under
another name and then renamed, so processes that run at once, or are ended while they write, leave no half of one; a
file whose contents do not fit its name is not used.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TextIO

VARIABLE = "FOLD3D_CACHE"
"""A folder, or "off"."""
_COMMANDS = ("trace", "plan")
_PACKAGES = ("torch", "transformers")
_MOST_FILES = 256
_PART = "fold3d-"


class Answer:
    """What a command line printed, and will print."""

    def __init__(self, words: Sequence[str]) -> None:
        """Args:
        words: of the command line, the subcommand first.
        """
        self._words = tuple(words)
        self._folder = folder_of_answers() if words and words[0] in _COMMANDS else None
        self._key = None if self._folder is None else _key(self._words)

    def find(self) -> str | None:
        """Returns what is kept of it, None if it must run."""
        path = self._path()
        return None if path is None or self._key is None else _read(path, self._key)

    def keep(self, run: Callable[[], None]) -> None:
        """Runs the command, and keeps what it prints. Raises: what it raises; that is not kept."""
        path, key = self._path(), self._key
        if path is None or key is None:
            run()
            return
        both = _Copied(sys.stdout)
        with redirect_stdout(both):
            run()
        if _key(self._words) != key:  # somebody changed the configuration, or code, meanwhile
            return
        with suppress(OSError):  # a full disk or a folder that may not be written to costs time, and nothing else
            _write(path, key, both.getvalue())

    def _path(self) -> Path | None:
        if self._folder is None or self._key is None:
            return None
        return self._folder / f"{hashlib.sha256(self._key.encode()).hexdigest()}.json"


def folder_of_answers() -> Path | None:
    """Returns the folder: $FOLD3D_CACHE, or fold3d in the user's folder of caches; None where it is switched off."""
    said = os.environ.get(VARIABLE, "")
    if said.lower() in ("off", "0"):
        return None
    if said:
        return Path(said).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "fold3d"
    except RuntimeError:  # nobody's home
        return None


class _Copied(io.StringIO):
    """Keeps what is written, and hands it on at once."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def write(self, text: str) -> int:
        self._out.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._out.flush()


def _key(words: Sequence[str]) -> str | None:
    """Returns everything that decides the answer, as text; None where that cannot be told without running.

    Words are not parsed, which takes torch: each that is a file or a folder may be the model.
    """
    if any(len(word) > 3 and "--measure".startswith(word) for word in words):
        return None
    try:
        said = [word.partition("=")[2] if word.startswith("--") else word for word in words[1:]]
        configs = [path.read_text() for path in map(_config, said) if path is not None]
        packages = [_package(name) for name in _PACKAGES]
    except (OSError, ValueError, PackageNotFoundError):
        return None
    # A function, or a model with code of its own.
    if not configs or any(map(_is_function, said)) or any("auto_map" in text for text in configs):
        return None
    parts = {
        "words": list(words),
        "configs": configs,
        "packages": packages,
        "code": _code(Path(__file__).parents[1]),
        "python": sys.version,
    }
    return json.dumps(parts, sort_keys=True)


def _is_function(word: str) -> bool:
    """Whether a word is MODULE:FUNCTION, whose code decides, too."""
    module, colon, function = word.partition(":")
    return bool(colon) and all(name.isidentifier() for name in (*module.split("."), *function.split(".")))


def _config(word: str) -> Path | None:
    path = Path(word)
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() else None


def _package(name: str) -> list[str]:
    """Returns a package's name, version, where it is and when it was put there."""
    found = distribution(name)
    place = Path(str(found.locate_file(name)))
    return [name, found.version, str(place), str(place.stat().st_mtime_ns)]


def _code(folder: Path) -> list[str]:
    """Returns the files of fold3d with their sizes and times."""
    made = []
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".py", ".so")):
                path = os.path.join(root, name)
                seen = os.stat(path)
                made.append(f"{os.path.relpath(path, folder)} {seen.st_size} {seen.st_mtime_ns}")
    return sorted(made)


def _read(path: Path, key: str) -> str | None:
    """Returns the answer in a file; None if there is none, or it is damaged or of something else."""
    try:
        found = json.loads(path.read_text())
        text = found["text"]
        whole = found["key"] == key and found["sha256"] == _digest(text)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return str(text) if whole else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, key: str, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_PART, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, "text": text, "sha256": _digest(text)}, file)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _drop_oldest(path.parent)


def _drop_oldest(folder: Path) -> None:
    # Not others' files in the folder. Parts are of processes that ended.
    files = sorted((*folder.glob("[0-9a-f]" * 64 + ".json"), *folder.glob(f"{_PART}*.part")), key=_written)
    for file in files[:-_MOST_FILES]:
        with suppress(OSError):  # another process was first
            file.unlink()


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
