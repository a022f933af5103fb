"""The faults fit the code as it is, are spread over it, and leave no trace."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.__main__ import check_clean, failed_tests, trial
from tests.mutations.faults import ROOT, Fault, FaultError, load

FAULTS = load()


def test_thirty_faults_with_names_of_their_own():
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 30
    assert all(fault.why.endswith(".") for fault in FAULTS)


def test_faults_are_spread_over_the_components():
    """Thirteen in C++ and seventeen in Python, each in a folder or module that no other one is in."""
    folders = [Path(fault.file).parent for fault in FAULTS if fault.file.startswith("csrc/")]
    components = [Path(fault.file).parts[1] for fault in FAULTS if fault.file.startswith("fold3d/")]
    assert (len(set(folders)), len(set(components))) == (len(folders), len(components)) == (13, 17)
    count = Counter(folder.parts[1] for folder in folders)
    assert count == {"core": 3, "comm": 4, "memory": 1, "kernels": 1, "runtime": 2, "ops": 1, "bindings": 1}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_changes_one_line_and_leaves_no_trace(fault: Fault, tmp_path):
    path = tmp_path / fault.file
    path.parent.mkdir(parents=True)
    before = (ROOT / fault.file).read_bytes()
    path.write_bytes(before)
    fault.apply(tmp_path)
    pairs = zip(before.split(b"\n"), path.read_bytes().split(b"\n"), strict=True)
    assert [(old.decode(), new.decode()) for old, new in pairs if old != new] == [(fault.old, fault.new)]
    with pytest.raises(FaultError, match="where 1 and 0 are needed"):
        fault.apply(tmp_path)
    fault.revert(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.full
def test_trial_tells_what_the_command_found(tmp_path):
    """The command sees the fault, its tests are named, and the file is as before, also after too long a command."""
    fault = Fault("wrong", "fold3d/sum.py", "a + b", "a - b", "It subtracts.")
    path = tmp_path / fault.file
    path.parent.mkdir()
    path.write_text("a + b\n")
    command = "grep -q 'a + b' fold3d/sum.py || { echo 'FAILED tests/test_sum.py::test[1-2] - wrong'; exit 1; }"
    log = tmp_path / "log"
    found = trial(fault, command, log, 10.0, tmp_path)
    assert (found.verdict, found.status, found.tests) == ("found", 1, ("tests/test_sum.py::test[1-2]",))
    assert trial(None, command, log, 10.0, tmp_path).verdict == "missed"
    assert trial(fault, "exit 2", log, 10.0, tmp_path).verdict == "failed, no test"
    assert trial(fault, "sleep 60", log, 0.01, tmp_path).verdict == "too long"
    assert path.read_text() == "a + b\n"


def test_names_of_failed_tests():
    output = """
[  FAILED  ] Ring.Mean/2, where GetParam() = 3 (4 ms)
[  FAILED  ] 1 test, listed below:
[  FAILED  ] Ring.Mean/2, where GetParam() = 3
FAILED tests/dist/test_parity.py::test_parity[1f1b pp2] - AssertionError: FAILED
ERROR tests/plan/test_search.py
FAILED tests/dist/test_parity.py::test_parity[1f1b pp2]
"""
    parity = "tests/dist/test_parity.py::test_parity[1f1b pp2]"
    assert failed_tests(output) == ("Ring.Mean/2", parity, "tests/plan/test_search.py")


def test_a_changed_tree_is_refused(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "fold3d").mkdir()
    (tmp_path / "fold3d/sum.py").write_text("a + b\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    check_clean(tmp_path)
    (tmp_path / "fold3d/sum.py").write_text("a - b\n")
    with pytest.raises(FaultError, match=r"fold3d/sum\.py.*uncommitted changes"):
        check_clean(tmp_path)
