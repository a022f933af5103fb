"""pytest plugin: transformers' own Trainer tests, with fold3d's classes in the place of the stock ones.

In a checkout of transformers, of the version that the package asks for:

    PYTHONPATH=FOLD3D:FOLD3D/scripts python -m pytest -p transformers_suite tests/trainer
    ... --layout segments=2        # fields of fold3d.TrainingArguments, for every test
    PYTHONPATH=... torchrun --nproc-per-node 2 --local-ranks-filter 0 \\
        -m pytest -p transformers_suite --layout pp=2 tests/trainer -k "neftune or inf_nan or special_token"

The test modules are not changed: whatever they import from transformers comes as it is, but Trainer and
TrainingArguments are fold3d's, and everything that a test module derives from them with it. The summary has a table by
file. A test counts as refused when it ends with a ConfigError of fold3d, or with a TraceError because --layout cuts a
model that cannot be cut: the reason is in docs/compatibility.md.

On several processes a test finds the same temporary folders and begins with the same random numbers everywhere.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.testing_utils

import fold3d

RANK = int(os.environ.get("RANK", "0"))
OUTCOMES = ("passed", "refused", "failed", "skipped")
# A process whose test failed waits nowhere; the other one's must end soon, and with it the wait for the next test.
_OF_SEVERAL = {"comm_timeout": 20.0}

_import = builtins.__import__
_proxies: dict[str, types.ModuleType] = {}
_outcomes: dict[str, Counter[str]] = {}
_reasons: Counter[str] = Counter()
_folders: Counter[str] = Counter()


class TrainingArguments(fold3d.TrainingArguments):
    """fold3d's, with the defaults that --layout gives."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--layout", default="", help="fold3d.TrainingArguments for every test: pp=2,segments=2")


def pytest_configure(config: pytest.Config) -> None:
    given = dict(one.split("=", 1) for one in config.getoption("--layout").split(",") if one)
    fields = {one.name: one for one in dataclasses.fields(fold3d.TrainingArguments)}
    defaults: dict[str, Any] = _OF_SEVERAL.copy() if "WORLD_SIZE" in os.environ else {}
    for name, value in given.items():
        defaults[name] = int(value) if value.isdecimal() else value
    TrainingArguments.__annotations__ = {name: fields[name].type for name in defaults}
    for name, value in defaults.items():
        setattr(TrainingArguments, name, value)
    dataclasses.dataclass(repr=False)(TrainingArguments)
    _replace("transformers", Trainer=fold3d.Trainer, TrainingArguments=TrainingArguments)
    _replace("transformers.trainer", Trainer=fold3d.Trainer)
    _replace("transformers.training_args", TrainingArguments=TrainingArguments)
    if "WORLD_SIZE" in os.environ:
        _replace("tempfile", TemporaryDirectory=_shared_folder, mkdtemp=_shared_folder_name)
        transformers.testing_utils.TestCasePlus.get_auto_remove_tmp_dir = lambda self, *_, **__: _shared_folder_name()
    builtins.__import__ = _import_for_tests


def pytest_unconfigure() -> None:
    builtins.__import__ = _import
    if RANK == 0:
        shutil.rmtree(_shared_root(), ignore_errors=True)


def pytest_runtest_setup() -> None:
    if "WORLD_SIZE" in os.environ:
        transformers.set_seed(0)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Counts a test by its last phase that says something."""
    file = _outcomes.setdefault(Path(str(item.path)).name, Counter())
    if call.excinfo is None:
        file["passed"] += call.when == "call"
    elif call.excinfo.errisinstance(pytest.skip.Exception) or "SkipTest" in call.excinfo.typename:
        file["skipped"] += 1
    elif (refusal := _refusal(call.excinfo.value)) is not None:
        file["refused"] += 1
        _reasons[str(refusal).partition(" is not available")[0].partition(":")[0]] += 1
    else:
        file["failed"] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    write = terminalreporter.write_line
    write("")
    write("| file | " + " | ".join(OUTCOMES) + " |")
    write("| --- " * (1 + len(OUTCOMES)) + "|")
    for file, counted in [*sorted(_outcomes.items()), ("all", sum(_outcomes.values(), Counter()))]:
        write(f"| `{file}` | " + " | ".join(str(counted[one]) for one in OUTCOMES) + " |")
    for reason, times in _reasons.most_common():
        write(f"refused {times}: {reason}")


def _refusal(error: BaseException | None) -> BaseException | None:
    while error is not None and not isinstance(error, (fold3d.ConfigError, fold3d.TraceError)):
        error = error.__cause__ or error.__context__
    return error


def _replace(module: str, **names: Any) -> None:
    proxy = _Proxy(module)
    vars(proxy).update(names)
    _proxies[module] = proxy


class _Proxy(types.ModuleType):
    """A module with some other names in it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[self.__name__], name)


def _import_for_tests(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> types.ModuleType:
    module = _import(name, globals, locals, fromlist, level)
    if level == 0 and str((globals or {}).get("__name__", "")).startswith("tests."):
        return _proxies.get(module.__name__, module)
    return module


# Folders that all processes see


def _shared_root() -> Path:
    job = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get("MASTER_PORT", "")
    return Path(tempfile.gettempdir()) / f"transformers-suite-{job}"


def _shared_folder_name(*_: Any, **__: Any) -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "collection").split(" ")[0].rpartition("::")[2]
    _folders[test] += 1
    path = _shared_root() / f"{test}-{_folders[test]}"
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


@contextlib.contextmanager
def _shared_folder(*_: Any, **__: Any) -> Iterator[str]:
    yield _shared_folder_name()
