"""What commands keep for the next time: the same answer, at once; never another one, whatever lies in the folder."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fold3d.cli import answers
from fold3d.cli.main import main

SIZES = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder, SIZES)
    return folder


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kept"
    monkeypatch.setenv("FOLD3D_CACHE", str(folder))
    return folder


def write_config(folder: Path, sizes: dict[str, int]) -> None:
    text = json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
    (folder / "config.json").write_text(text)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("fails", [False, True])
def test_python_collects_as_before_after_a_command(kept, model, fails: bool) -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    assert main(["trace", str(model), *(["-p", "9"] if fails else [])]) == int(fails)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() <= frozen


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("words", [["trace"], ["plan", "-w", "2"]])
def test_the_second_answer_needs_neither_torch_nor_the_model(kept, model, capsys, words: list[str]) -> None:
    first = said(capsys, *words, model, "-p", 2)
    assert "GPT2LMHeadModel" in first
    code = (
        "import sys; from fold3d.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or int('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    command = [sys.executable, "-c", code, *words, str(model), "-p", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, first), done.stderr


@pytest.mark.full
def test_plans_are_kept_and_measurements_are_not(kept, model, capsys) -> None:
    first = said(capsys, "plan", model, "-w", 2, "-p", 2)
    assert len(files(kept)) == 1
    assert said(capsys, "plan", model, "-w", 2, "-p", 2) == first
    said(capsys, "plan", model, "-w", 2, "-p", 2, "--measure")
    assert len(files(kept)) == 1


def test_each_order_of_words_has_an_answer_of_its_own(kept, model) -> None:
    first, second = (answers._key(["plan", str(model), "-p", p, "-t", t]) for p, t in (("2", "4"), ("4", "2")))
    assert first is not None and second is not None and first != second


@pytest.mark.full
def test_other_options_configurations_and_code_get_answers_of_their_own(kept, model, capsys, monkeypatch) -> None:
    first = said(capsys, "trace", model)
    assert said(capsys, "trace", model, "-p", 2).startswith(first)
    write_config(model, SIZES | {"n_layer": 6})
    assert said(capsys, "trace", model) != first
    assert len(files(kept)) == 3
    monkeypatch.setattr(answers, "_code", lambda folder: ["trace.py 1 1"])
    said(capsys, "trace", model)
    monkeypatch.setattr(answers, "_package", lambda name: [name, "0.0"])
    said(capsys, "trace", model)
    assert len(files(kept)) == 5


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("damage", ["", "{", "null", "[1]", '{"key": 1}', "swapped"])
def test_damaged_files_are_made_anew(kept, model, capsys, damage: str) -> None:
    first = said(capsys, "trace", model)
    [file] = files(kept)
    whole = file.read_text()
    file.write_text(whole.replace("GPT2LMHeadModel", "GPT3LMHeadModel") if damage == "swapped" else damage)
    assert said(capsys, "trace", model) == first
    assert file.read_text() == whole
    assert files(kept) == [file]


def test_a_folder_that_cannot_be_written_to_changes_nothing(kept, model, capsys) -> None:
    kept.write_text("a file, and no folder")
    first = said(capsys, "trace", model)
    assert said(capsys, "trace", model) == first
    assert kept.read_text() == "a file, and no folder"


def test_it_can_be_switched_off(kept, model, capsys, monkeypatch) -> None:
    monkeypatch.setenv("FOLD3D_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    said(capsys, "trace", model)
    assert files(kept) == []


def test_errors_are_not_kept(kept, model, capsys) -> None:
    for _ in range(2):
        assert main(["trace", str(model), "-p", "9"]) == 1
        assert "9 chunks" in capsys.readouterr().err
    assert files(kept) == []


def test_many_may_write_and_read_one_file_at_once(tmp_path: Path) -> None:
    path, text = tmp_path / "one.json", "x" * 200_000

    def turn(_: int) -> str | None:
        answers._write(path, "key", text)
        return answers._read(path, "key")

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(turn, range(64))) == {text}
    assert files(tmp_path) == [path]


def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others: the folder may be the user's."""
    monkeypatch.setattr(answers, "_MOST_FILES", 3)

    def named(number: int) -> Path:
        return tmp_path / (f"{number:064x}.json" if number else "fold3d-0.part")

    others = [tmp_path / "config.json", tmp_path / "download.part"]
    for number, left in enumerate((*map(named, range(5)), *others)):
        left.touch()
        os.utime(left, (number, number))
    answers._write(named(5), "key", "text")
    assert files(tmp_path) == sorted([*map(named, (3, 4, 5)), *others])


def test_what_a_function_makes_is_not_kept(tmp_path: Path) -> None:
    """Its code is nobody's configuration; a file beside it, of a cluster, made it one."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("hosts = 1\n")
    assert answers._key(["plan", str(cluster), "--device", "A100:2,T4:2"]) is not None
    assert answers._key(["plan", "mine:build", "--cluster", str(cluster)]) is None
    assert answers._key(["trace", "--cluster", str(cluster), "my.package:models.build"]) is None
