"""A checkpoint is complete under its final name, or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

from fold3d.checkpoint import CheckpointFolder, last_committed, remove_stale
from fold3d.errors import CheckpointError


def test_commit_moves_everything(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoint-5")
    folder.begin()
    (folder.temporary / "deep").mkdir()
    (folder.temporary / "deep" / "file").write_text("x")
    assert not folder.final.exists()
    folder.commit()
    assert (folder.final / "deep" / "file").read_text() == "x" and not folder.temporary.exists()


def test_temporary_folder_is_invisible_to_the_stock_trainer(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path / "checkpoint-7").begin()
    (tmp_path / "checkpoint-5").mkdir()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-5")
    assert sort_checkpoints(str(tmp_path)) == [str(tmp_path / "checkpoint-5")]


def test_an_older_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoint-5")
    for content in ("old", "new"):
        folder.begin()
        (folder.temporary / content).touch()
        folder.commit()
    assert [path.name for path in folder.final.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_begin_drops_what_an_interrupted_save_left(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoint-5")
    folder.begin()
    (folder.temporary / "half").touch()
    folder.begin()
    (mark,) = folder.temporary.iterdir()
    assert mark.name.startswith(".of-")


def test_remove_stale(tmp_path: Path) -> None:
    for name in ("tmp-checkpoint-5", "checkpoint-4", "tmp-mine", "tmp-checkpoint-x", "tmp-old-checkpoint-4"):
        (tmp_path / name).mkdir()
    (tmp_path / "tmp-checkpoint-9").touch()  # a file of the user's
    removed = remove_stale(tmp_path)
    assert [path.name for path in removed] == ["tmp-checkpoint-5", "tmp-old-checkpoint-4"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-4", "tmp-checkpoint-9", "tmp-checkpoint-x", "tmp-mine"]


def test_a_checkpoint_set_aside_comes_back(tmp_path: Path) -> None:
    """The run died between moving the old folder away and moving the new one in."""
    (tmp_path / "tmp-old-checkpoint-5").mkdir()
    assert remove_stale(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.zeros(3)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return folder


def test_the_last_whole_checkpoint_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert last_committed(tmp_path / "nowhere") is None and last_committed(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "tmp-checkpoint-12", "checkpoint-x"):
        checkpoint(tmp_path / name)
    assert last_committed(tmp_path) == tmp_path / "checkpoint-11"
    cut = tmp_path / "checkpoint-11" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-4])
    assert last_committed(tmp_path) == tmp_path / "checkpoint-10"
    assert "checkpoint-11 is cut short" in caplog.text and "passed over" in caplog.text


def test_two_trainings_in_one_folder(tmp_path: Path) -> None:
    """The one that ended first gave the other's half-written folder its final name."""
    first, second = (CheckpointFolder(tmp_path / "checkpoint-4") for _ in range(2))
    first.begin()
    second.begin()
    (second.temporary / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"two trainings save into .* at once; give each an output_dir"):
        first.commit()
    second.commit()
    assert [path.name for path in (tmp_path / "checkpoint-4").iterdir()] == ["file"]
    remove_stale(tmp_path)
    first.begin()
    remove_stale(tmp_path)
    with pytest.raises(CheckpointError, match="has been removed"):
        first.check()


def test_weights_alone_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training cannot go on from them: nobody knows how many steps are done."""
    for name in ("checkpoint-9", "checkpoint-10"):
        checkpoint(tmp_path / name)
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    assert last_committed(tmp_path) == tmp_path / "checkpoint-9"
    assert "checkpoint-10 has neither fold3d.json nor trainer_state.json" in caplog.text


@pytest.mark.parametrize("is_there", [True, False])
def test_a_checkpoint_that_is_a_link_is_replaced(tmp_path: Path, is_there: bool) -> None:
    """The next training could not begin, or the save failed."""
    elsewhere = tmp_path / "other disk" / "checkpoint-4"
    if is_there:
        checkpoint(elsewhere)
    output = tmp_path / "out"
    output.mkdir()
    (output / "checkpoint-4").symlink_to(elsewhere)
    folder = CheckpointFolder(output / "checkpoint-4")
    folder.begin()
    folder.commit()
    assert remove_stale(output) == [] and [path.name for path in output.iterdir()] == ["checkpoint-4"]
    assert not folder.final.is_symlink() and elsewhere.exists() == is_there
