"""docs/compatibility.toml against the code: complete, and right about what is refused and what is not.

After a wanted change:  python docs/tables.py
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed.fsdp
import transformers
from accelerate.state import AcceleratorState

import fold3d
from docs import tables
from fold3d import Trainer, TrainingArguments
from fold3d.errors import ConfigError
from fold3d.trainer.refused import REFUSED

TESTS = Path(__file__).parents[1]
TABLES = tables.tables()
ARGUMENTS = TABLES["arguments"]
FIELDS = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments)}


def made(**named: Any) -> TrainingArguments:
    return TrainingArguments(**({"output_dir": "unused", "use_cpu": True} | named))


def test_every_argument_is_there() -> None:
    assert list(ARGUMENTS) == list(FIELDS)


def test_every_public_name_of_the_trainer_is_there() -> None:
    names = [name for name in dir(transformers.Trainer) if not name.startswith("_")]
    assert sorted(TABLES["methods"]) == names


def test_every_argument_of_the_constructor_is_there() -> None:
    assert list(TABLES["parameters"]) == list(inspect.signature(transformers.Trainer.__init__).parameters)[1:]


def test_everything_that_is_refused_is_there() -> None:
    assert {name for name, row in ARGUMENTS.items() if "refused" in row} == set(REFUSED)


@pytest.mark.parametrize("name", [name for name, row in ARGUMENTS.items() if "refused" in row])
def test_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**{name: ARGUMENTS[name]["refused"]})
    assert str(caught.value).startswith(f"{name}=") and REFUSED[name][1] in str(caught.value)


@pytest.mark.parametrize("name", [name for name, row in ARGUMENTS.items() if "value" in row])
def test_is_not_refused(name: str) -> None:
    row, field = ARGUMENTS[name], FIELDS[name]
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    assert row["value"] != default, "the default shows nothing"
    args = made(**{name: row["value"]}, **row.get("with", {}))
    stock = transformers.TrainingArguments(
        **({"output_dir": "unused", "use_cpu": True, name: row["value"]} | row.get("with", {}))
    )
    assert getattr(args, name) == getattr(stock, name) or name == "accelerator_config"


def placed(model: torch.nn.Module) -> None:
    model.hf_device_map = {"": 0}  # type: ignore[assignment]


def quantised(model: torch.nn.Module) -> None:
    model.quantization_method = "gptq"  # type: ignore[assignment]


@pytest.mark.parametrize("change, words", [(placed, "device_map"), (quantised, "gptq keeps its weights in buffers")])
def test_models_that_are_refused(change: Callable[..., None], words: str) -> None:
    model = torch.nn.Linear(2, 2)
    change(model)
    with pytest.raises(ConfigError, match=words):
        Trainer(model, made(), train_dataset=[])


class KeepsItself(torch.nn.Linear):
    """Has a state that is no buffer."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)


@pytest.mark.parametrize("strategy", ["no", "steps"])
def test_a_state_that_is_neither_saved_nor_loaded_is_refused_before_training(strategy: str) -> None:
    trainer = Trainer(KeepsItself(2, 2), made(max_steps=1, save_strategy=strategy), train_dataset=[{"input": 1}])
    with pytest.raises(ConfigError, match=r"the model \(KeepsItself\) keeps a state of its own .*get_extra_state"):
        trainer.train() if strategy == "steps" else trainer.save_model()


def test_models_that_accelerate_prepared_are_refused(tmp_path: Path) -> None:
    """Its forward hides what the model's own takes. The way back that the message names is one."""
    AcceleratorState._reset_state(True)  # one of another test may have another precision
    model = torch.nn.Linear(2, 2)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    with pytest.raises(ConfigError, match="prepared by accelerate"):
        Trainer(prepared, made(output_dir=str(tmp_path)), train_dataset=[])
    with pytest.raises(ConfigError, match="prepared by accelerate"):
        fold3d.Engine(prepared, fold3d.ParallelConfig())
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    fold3d.Engine(plain, fold3d.ParallelConfig()).close()


def test_a_model_of_an_earlier_training_is_not(tmp_path: Path) -> None:
    """fold3d's own accelerator prepares it as well."""
    model = torch.nn.Linear(2, 2)
    args = made(output_dir=str(tmp_path), bf16=True)
    first = Trainer(model, args, train_dataset=[])
    first.accelerator.prepare_model(model)
    assert "_original_forward" in vars(model)
    Trainer(model, args, train_dataset=[])


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}, {"segments": 2}], ids=str)
def test_debugging_a_cut_model_is_refused(monkeypatch: pytest.MonkeyPatch, layout: dict[str, int]) -> None:
    """Its hooks met tensors of other chunks in the middle of a step."""
    monkeypatch.setenv("WORLD_SIZE", str(layout.get("pp", 1) * layout.get("tp", 1)))
    with pytest.raises(ConfigError, match=r"^debug='underflow_overflow' is not available with pp="):
        made(debug="underflow_overflow", **layout)
    monkeypatch.delenv("WORLD_SIZE")
    assert made(debug="underflow_overflow").segments == 1


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "wrapper", ["DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "fully_shard"]
)
def test_wrapped_models_are_refused(wrapper: str, inside: bool) -> None:
    """All of them communicate by themselves; fold3d would sum gradients twice, or wait for ever."""
    model = torch.nn.Linear(2, 2)
    if wrapper == "fully_shard":
        # What fully_shard does to a module, without a process group.
        model.__class__ = type("FSDPLinear", (torch.distributed.fsdp.FSDPModule, torch.nn.Linear), {})
    else:
        kinds = {
            "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
            "DataParallel": torch.nn.DataParallel,
            "FullyShardedDataParallel": torch.distributed.fsdp.FullyShardedDataParallel,
        }
        whole = kinds[wrapper].__new__(kinds[wrapper])
        torch.nn.Module.__init__(whole)
        whole.module = model
        model = whole
    given = torch.nn.Sequential(model) if inside else model
    with pytest.raises(ConfigError, match=r"spread over processes already: .* is a \w+\. fold3d does that itself"):
        fold3d.Engine(given, fold3d.ParallelConfig())


def test_two_parameters_in_one_memory() -> None:
    """Where the model is cut, or replicas step parts of it, they became two without a word."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are in the same memory"):
        fold3d.Engine(model, fold3d.ParallelConfig(segments=2))


def test_several_gpus_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ConfigError, match="start one process per GPU"):
        made()


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_whole(table: str) -> None:
    for name, row in TABLES[table].items():
        known = {"works", "differs", "refused", "tests"} | ({"value", "with"} if table == "arguments" else set())
        assert set(row) <= known, name
        state = tables.state_of(row)
        assert state in tables.STATES and ("refused" not in row or table == "arguments" or state == "refused")
        assert row[state] != "" or state == "works", f"{name}: what, then, is different?"
        if table == "arguments" and state != "refused":
            assert "value" in row or "tests" in row, f"{name}: a value shows that it is not refused"
        scripts_only = str(row[state]).startswith("Read by scripts alone")
        assert bool(row.get("tests")) or state != "works" or scripts_only, f"{name}: which test says so?"
        assert state != "refused" or "tests" in row or table == "arguments", f"{name}: which test sees it refused?"


@functools.cache
def _contents(file: str) -> tuple[str, set[str]]:
    """Returns the text of a test file, with that of its folder's jobs, and the names of its tests."""
    path = TESTS / file
    tree = ast.parse(path.read_text())
    names = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    jobs = [folder_file.read_text() for folder_file in sorted(path.parent.glob("*jobs*.py"))]
    extra = [(TESTS / "dist" / "parity_extra.py").read_text()] if path.parent.name == "dist" else []
    return "\n".join([path.read_text(), *jobs, *extra]), names


@pytest.mark.parametrize("table", TABLES)
def test_the_named_tests_exist(table: str) -> None:
    for name, row in TABLES[table].items():
        for test in row.get("tests", []):
            file, _, function = test.partition("::")
            text, names = _contents(file)
            assert not function or function in names, f"{name}: {test}"
            if table == "arguments" and row.get("with", {}).get(name) is None:
                assert name in text, f"{test} does not mention {name}"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_pages_are_up_to_date(page: Path) -> None:
    assert page.read_text() == tables.filled(page), "run: python docs/tables.py"


def test_the_version_on_the_page() -> None:
    minor = ".".join(transformers.__version__.split(".")[:2])
    assert f"**transformers {minor}**" in tables.PAGE.read_text()
