"""Manifest: fold3d.json, the last file written into a checkpoint; says what must be there.

Nothing in it depends on the layout: a checkpoint resumes under any dp, pp and segments. Checkpoints of the stock
Trainer have no manifest; those are judged by what their own files say about themselves.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from fold3d.checkpoint import safetensors_file
from fold3d.errors import CheckpointError

NAME = "fold3d.json"
_VERSION = 1
_STATE = "trainer_state.json"
_INDEX = "model.safetensors.index.json"


def write(folder: Path, *, step_index: int) -> None:
    """Writes the manifest of everything now in `folder`; step_index: optimizer steps the engine has begun."""
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != NAME
    }
    content = {"version": _VERSION, "step_index": step_index, "files": files}
    (folder / NAME).write_text(json.dumps(content, indent=2) + "\n")


def step_index(folder: Path) -> int:
    """Returns the engine's step index at the time of saving: global_step where the stock Trainer wrote."""
    for name, key in ((NAME, "step_index"), (_STATE, "global_step")):
        if (folder / name).is_file():
            return int(_load(folder / name)[key])
    raise CheckpointError(f"{folder} has neither {NAME} nor {_STATE}: it is not a Trainer checkpoint")


def check(folder: Path) -> None:
    """Raises CheckpointError unless the checkpoint's files are there and whole. Reads sizes and headers only."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: the folder does not exist")
    problem = _against_manifest(folder) if (folder / NAME).is_file() else _against_itself(folder)
    if problem is not None:
        raise CheckpointError(
            f"the checkpoint {folder} is cut short: {problem}. Resume from an earlier one, or copy it again"
        )


def _against_manifest(folder: Path) -> str | None:
    files = _load(folder / NAME).get("files", {})
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {NAME} says {size}"
    return None


def _against_itself(folder: Path) -> str | None:
    weights = sorted(folder.glob("model*.safetensors"))
    if (folder / _INDEX).is_file():
        named = set(_load(folder / _INDEX)["weight_map"].values())
        missing = sorted(named - {path.name for path in weights})
        if missing:
            return f"{missing[0]} is missing, {_INDEX} names it"
    if not weights:
        return "it holds no model*.safetensors"
    for path in weights:
        problem = safetensors_file.defect(path)
        if problem is not None:
            return problem
    for path in sorted([*folder.glob("*.pt"), *folder.glob("*.pth")]):
        # torch.save writes a zip archive, its table of contents at the end: gone when the file is cut.
        if not zipfile.is_zipfile(path):
            return f"{path.name} ({path.stat().st_size} bytes) is no complete torch file"
    if (folder / _STATE).is_file():
        _load(folder / _STATE)
    return None


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is cut short: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content
