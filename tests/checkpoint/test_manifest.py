"""Every way a checkpoint can be cut short is found, with and without a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fold3d.checkpoint import manifest, reading
from fold3d.errors import CheckpointError

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint without manifest, as the stock Trainer writes it."""
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    save_file({"w": torch.zeros(40)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"x": torch.zeros(500)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return folder


@pytest.mark.parametrize("written_by", ["fold3d", "stock"])
def test_whole_checkpoint(folder: Path, written_by: str) -> None:
    if written_by == "fold3d":
        manifest.write(folder, step_index=4)
    manifest.check(folder)
    assert manifest.step_index(folder) == (4 if written_by == "fold3d" else 3)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("written_by", ["fold3d", "stock"])
def test_cut_file(folder: Path, written_by: str, name: str) -> None:
    if written_by == "fold3d":
        manifest.write(folder, step_index=4)
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=rf"cut short.*{name}|{name} is cut short"):
        manifest.check(folder)


def test_missing_file(folder: Path) -> None:
    manifest.write(folder, step_index=4)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"optimizer\.pt is missing, .* on purpose\? Then remove fold3d\.json, too"
    ):
        manifest.check(folder)
    (folder / manifest.NAME).unlink()
    manifest.check(folder)


def test_weights_of_older_versions(folder: Path) -> None:
    """It was said to be cut short."""
    manifest.write(folder, step_index=4)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"weights in pytorch_model\.bin, .*: load the model with from_pretrained"
    ):
        manifest.check(folder)


def test_missing_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        manifest.check(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no model\*\.safetensors"):
        manifest.check(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"Can't find a valid checkpoint at .*checkpoint-9: the folder does not exist"
    ) as error:
        manifest.check(tmp_path / "checkpoint-9")
    assert isinstance(error.value, CheckpointError)
    with pytest.raises(CheckpointError, match="not a Trainer checkpoint"):
        manifest.step_index(tmp_path)


@pytest.mark.parametrize("name", ["trainer_state.json", manifest.NAME])
@pytest.mark.parametrize("content", ["{}", "[]"])
def test_a_file_that_does_not_say_how_many_steps_are_done(folder: Path, name: str, content: str) -> None:
    manifest.write(folder, step_index=4)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name} does not"):
        manifest.check(folder)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_bytes_that_are_wrong_at_the_begin_of_a_file_are_an_error_that_names_it(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(bytes(64) + path.read_bytes()[64:])
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"), reading(path):
        torch.load(path, weights_only=True)


def test_manifest_itself_cut(folder: Path) -> None:
    manifest.write(folder, step_index=4)
    path = folder / manifest.NAME
    path.write_text(path.read_text()[:30])
    with pytest.raises(CheckpointError, match=r"fold3d\.json is cut short"):
        manifest.check(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}], ids=str)
def test_an_index_without_a_map(folder: Path, index: Any) -> None:
    """It ended in a KeyError."""
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"cut short: model\.safetensors\.index\.json has no weight_map"):
        manifest.check(folder)


@pytest.mark.parametrize("is_divided", [False, True])
def test_weights_that_are_links_to_what_is_gone(folder: Path, is_divided: bool) -> None:
    """As a cache that was cleared leaves them."""
    manifest.write(folder, step_index=4)
    path = folder / "model.safetensors"
    path.unlink()
    if is_divided:
        path = folder / "model-00001-of-00001.safetensors"
        index = {"metadata": {}, "weight_map": {"w": path.name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    path.symlink_to(folder / "blobs" / "gone")
    with pytest.raises(CheckpointError, match=r"00001\.safetensors is missing" if is_divided else "holds no model"):
        manifest.check(folder)


@pytest.mark.parametrize("is_ours", [False, True])
def test_files_of_the_user_are_not_judged(folder: Path, is_ours: bool) -> None:
    """A line of JSON after another made the whole checkpoint one that is cut short."""
    names = {"samples.json": b'{"a": 1}\n{"a": 2}\n', "notes.json": b"", "ema.pt": b"an older format"}
    for name, content in names.items():
        (folder / name).write_bytes(content)
    if is_ours:
        manifest.write(folder, step_index=4)
    manifest.check(folder)


def test_a_state_that_is_a_link_to_what_is_gone(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()
    (folder / "optimizer.pt").symlink_to("/nowhere/blob")
    with pytest.raises(CheckpointError, match=r"cut short: optimizer\.pt is a link to what is gone"):
        manifest.check(folder)


def test_weights_divided_into_other_files(folder: Path) -> None:
    manifest.write(folder, step_index=4)
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        save_file({name[:11]: torch.zeros(20)}, folder / name)
    index = {"metadata": {}, "weight_map": {name[:11]: name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest.check(folder)
    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"cut short.*{names[1]}"):
        manifest.check(folder)


def test_an_edited_state(folder: Path) -> None:
    manifest.write(folder, step_index=4)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 1}))
    manifest.check(folder)


def test_a_text_that_is_shorter_than_it_was(folder: Path) -> None:
    (folder / "vocab.txt").write_text("one two three")
    manifest.write(folder, step_index=4)
    manifest.check(folder)
    (folder / "vocab.txt").write_text("one t")
    with pytest.raises(CheckpointError, match=r"vocab\.txt has 5 bytes"):
        manifest.check(folder)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"files": ["model.safetensors"]}, "no number of bytes for each of its files"),
        ({"files": {"model.safetensors": "160"}}, "no number of bytes for each of its files"),
        ({"batch": 0}, "batch=0, which is no number of samples"),
        ({"batch": "8"}, "batch='8', which is no number of samples"),
        ({"version": 99}, "of version 99, and this fold3d reads versions up to"),
        ({"step_index": -3}, "does not say step_index"),
        ({"step_index": True}, "does not say step_index"),
    ],
)
def test_what_a_manifest_may_say(folder: Path, said: dict[str, Any], why: str) -> None:
    manifest.write(folder, step_index=4, batch=8)
    path = folder / manifest.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    with pytest.raises(CheckpointError, match=why):
        manifest.check(folder)
