"""Manifest: fold3d.json, the last file written into a checkpoint; says what must be there.

Nothing in it depends on the layout: a checkpoint resumes under any dp, pp and segments. Checkpoints of the stock
Trainer have no manifest. Files that say of themselves whether they are whole are judged by that, with or without one:
people divide weights into other files and edit a trainer_state.json.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

from fold3d.checkpoint.names import ADAPTER_FILE
from fold3d.errors import CheckpointError
from fold3d.weights.safetensors_file import read_header

NAME = "fold3d.json"
TRAINER_STATE = "trainer_state.json"
_VERSION = 1
_SAMPLE = 1 << 16
"""Bytes at the end of a file that tell it from others."""
_STEPS = {NAME: "step_index", TRAINER_STATE: "global_step"}
"""Files that say how many steps are done, the surer one first, and the key of it."""
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model*.safetensors"
"""A PeftModel has adapters instead, here or in folders named after them."""
_PICKLED = "pytorch_model*.bin"
_TELLING = (
    *(_WEIGHTS, ADAPTER_FILE, "late_gradients*.safetensors", NAME, TRAINER_STATE, _INDEX, "*config.json"),
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
)
"""Files that show by themselves whether they are whole; others may be the user's, in formats of their own."""


def write(
    folder: Path,
    *,
    step_index: int,
    batch: int | None = None,
    late_settings: list[dict[str, Any]] | None = None,
    mesh: dict[str, int] | None = None,
) -> None:
    """Writes the manifest of everything now in `folder`.

    Args:
        step_index: optimizer steps the engine has begun.
        batch: samples of an optimizer step, over all replicas.
        late_settings: with which the gradients in the folder will be taken; None: there are none.
        mesh: what parallel="auto" has decided; it is tried again, and needs not be.
    """
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != NAME and not path.name.startswith(".")
    }
    content: dict[str, Any] = {"version": _VERSION, "step_index": step_index, "batch": batch, "files": files}
    if late_settings is not None:
        content["late_settings"] = late_settings
    if mesh is not None:
        content["mesh"] = mesh
    (folder / NAME).write_text(json.dumps(content, indent=2) + "\n")


def step_index(folder: Path) -> int:
    """Returns the engine's step index at the time of saving: global_step where the stock Trainer wrote."""
    for name, key in _STEPS.items():
        if (folder / name).is_file():
            return int(_load(folder / name)[key])
    raise CheckpointError(f"{folder} has neither {' nor '.join(_STEPS)}: it is not a Trainer checkpoint")


def digest(folder: Path) -> str:
    """Returns letters that are the same for a copy of the checkpoint, and others for one of another training."""
    made = hashlib.sha256()
    for path in [folder / TRAINER_STATE, *sorted(folder.glob(_WEIGHTS))]:
        if path.is_file():
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - _SAMPLE))
                made.update(file.read(_SAMPLE))
    return made.hexdigest()[:8]


def said(folder: Path, name: str, file: str = NAME) -> Any:
    """Returns what `write` was given as the argument `name`, or what another file says; None where none does."""
    return _load(folder / file).get(name) if (folder / file).is_file() else None


def check(folder: Path) -> None:
    """Raises CheckpointError unless the checkpoint's files are there and whole. Reads sizes and headers only."""
    if not folder.is_dir():
        raise CheckpointError(f"Can't find a valid checkpoint at {folder}: the folder does not exist")
    if not any(folder.glob(_WEIGHTS)) and any(folder.glob(_PICKLED)):
        raise CheckpointError(
            f"the checkpoint {folder} has its weights in {min(folder.glob(_PICKLED)).name}, as older versions of "
            "transformers wrote them, and fold3d reads safetensors: load the model with from_pretrained, and write it "
            "into the same folder with save_pretrained; the other files may stay"
        )
    problem = _in_weights(folder) or _in_recorded(folder) or _in_present(folder)
    if problem is not None:
        raise CheckpointError(
            f"the checkpoint {folder} is cut short: {problem}. Resume from an earlier one, or copy it again"
        )


def _in_weights(folder: Path) -> str | None:
    """The weights may have been divided into other files since: an index and the files themselves say what counts."""
    weights = {path.name for path in folder.glob(_WEIGHTS) if path.is_file()}  # and no link to what is gone
    if (folder / _INDEX).is_file():
        files = _load(folder / _INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(one, str) for one in files.values()):
            return f"{_INDEX} has no weight_map with a file for each name"
        missing = sorted(set(files.values()) - weights)
        if missing:
            return f"{missing[0]} is missing, {_INDEX} names it"
    return None if weights or any(folder.rglob(ADAPTER_FILE)) else f"it holds no {_WEIGHTS}"


def _in_recorded(folder: Path) -> str | None:
    if not (folder / NAME).is_file():
        return None
    content = _load(folder / NAME)
    files, batch, version = content.get("files", {}), content.get("batch"), content.get("version", _VERSION)
    if not isinstance(files, dict) or not all(map(_is_count, files.values())):
        return f"{NAME} has no number of bytes for each of its files"
    if batch is not None and not (_is_count(batch) and batch):
        return f"{NAME} says batch={batch!r}, which is no number of samples"
    if not _is_count(version) or version > _VERSION:
        return f"{NAME} is of version {version!r}, and this fold3d reads versions up to {_VERSION}"
    for name, size in files.items():
        path = folder / name
        if path.match(_WEIGHTS) or name == _INDEX:
            continue
        if not path.is_file():
            return (
                f"{name} is missing, {NAME} says that it was there (removed on purpose? Then remove {NAME}, too: "
                "training goes on with what is there)"
            )
        if not _tells(path) and path.suffix != ".json" and path.stat().st_size < size:
            return f"{name} has {path.stat().st_size} bytes, {NAME} says {size}"
    return None


def _in_present(folder: Path) -> str | None:
    """What the files say about themselves: some may have been written again, a trainer_state.json for one."""
    for path in sorted(filter(_tells, folder.rglob("*"))):
        problem = None
        if not path.is_file():
            return f"{path.name} is a link to what is gone" if path.is_symlink() else f"{path.name} is no file"
        if path.suffix == ".safetensors":
            problem = defect(path)
        elif path.suffix == ".json":
            content, key = _parsed(path), _STEPS.get(path.name)
            if key is not None and not (isinstance(content, dict) and _is_count(content.get(key))):
                problem = f"{path.name} does not say {key}"
        elif not zipfile.is_zipfile(path):
            # torch.save writes a zip archive, its table of contents at the end: gone when the file is cut.
            problem = f"{path.name} ({path.stat().st_size} bytes) is no complete torch file"
        if problem is not None:
            return problem
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tells(path: Path) -> bool:
    return any(map(path.match, _TELLING))


def defect(path: Path) -> str | None:
    """Returns what is wrong with a safetensors file judged by its header and size, None when nothing is."""
    try:
        read_header(path)
    except ValueError as error:
        return str(error)
    return None


def _load(path: Path) -> dict[str, Any]:
    content = _parsed(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is cut short: {error}") from error
