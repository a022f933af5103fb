"""`python -m tests.mutations`: lists the faults, puts one into this tree, or asks whether a command finds them."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from tests.mutations.faults import ROOT, Fault, FaultError, load

LOGS = ROOT / "out/mutations"
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_FAILED = re.compile(r"^(?:(?:FAILED|ERROR) (tests/.+?)(?: - .*)?|\[  FAILED  \] ([\w/]+\.[\w/]+).*)$", re.MULTILINE)


class Result(NamedTuple):
    """How a command ended; `status` is None where it took too long."""

    fault: str
    file: str
    status: int | None
    seconds: int
    verdict: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        """Returns its line of the table."""
        shown = ", ".join(f"`{one}`" for one in self.tests[:3]).replace("|", "\\|")
        return "".join(f"| {one} " for one in (*self[:5], shown)) + "|\n"


def failed_tests(output: str) -> tuple[str, ...]:
    """Returns the tests of pytest and GoogleTest that an output says have failed, each once, in its order."""
    return tuple(dict.fromkeys(one or other for one, other in _FAILED.findall(output)))


def check_clean(root: Path) -> None:
    """Raises FaultError where csrc or fold3d differ from the last commit: a trial would take that for its own."""
    command = ["git", "diff", "--name-only", "HEAD", "--", "csrc", "fold3d"]
    changed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    if changed:
        raise FaultError(f"{changed} have uncommitted changes; commit them, or revert the fault that is in them")


def trial(fault: Fault | None, command: str, log: Path, timeout_s: float, root: Path = ROOT) -> Result:
    """Runs a command of the shell in the tree with the fault, or without one; its output goes to the file `log`."""
    began = time.monotonic()
    with fault.applied(root) if fault else nullcontext(), log.open("wb") as out:
        shell = subprocess.Popen(command, shell=True, cwd=root, stdout=out, stderr=out, start_new_session=True)
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = shell.wait(timeout_s)
        finally:
            _end(shell)
    tests = failed_tests(_COLOR.sub("", log.read_text(errors="replace")))
    # A command that fails without a test has perhaps not come to the tests: a person shall look.
    verdict = "missed" if status == 0 else "too long" if status is None else "found" if tests else "failed, no test"
    name, file = (fault.name, fault.file) if fault else ("none", "")
    return Result(name, file, status, round(time.monotonic() - began), verdict, tests)


def _end(shell: subprocess.Popen[bytes]) -> None:
    """Ends what the command left running, as Ctrl-C would, and kills what is left of that after half a minute."""
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            shell.wait(30)
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()


def _run(faults: list[Fault], args: argparse.Namespace) -> int:
    """Returns 0 where the command finds nine in ten of the faults, else 1."""
    head = "| fault | file | exit | seconds | verdict | first tests that failed |\n" + "| --- " * 6 + "|\n"
    results: list[Result] = []
    LOGS.mkdir(parents=True, exist_ok=True)
    for fault in [*([] if args.names else [None]), *faults]:
        log = LOGS / f"{fault.name if fault else 'none'}.log"
        results.append(trial(fault, args.run, log, args.timeout))
        sys.stdout.write(str(results[-1]))
        sys.stdout.flush()
        if args.table:
            args.table.write_text(f"Command: `{args.run}`\n\n{head}{''.join(map(str, results))}")
        if fault is None and results[-1].status != 0:
            raise FaultError(f"the command fails without a fault, too; see {log}")
    found = sum(result.verdict == "found" for result in results)
    sys.stdout.write(f"{found} of {len(faults)} found\n")
    return 0 if found * 10 >= len(faults) * 9 else 1


def main() -> int:
    """Returns the exit status: 0, 1 where too few faults were found, 2 where something is in the way."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="print the faults")
    what.add_argument("--apply", metavar="NAME", help="put a fault into this tree")
    what.add_argument("--revert", metavar="NAME", help="take it out again")
    what.add_argument("--run", metavar="COMMAND", help="for the shell; what it writes is kept in out/mutations")
    parser.add_argument("names", nargs="*", metavar="FAULT", help="those that --run tries (all, and none first)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where --run writes its results, in Markdown")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="of one command (3600)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception takes the fault out of the tree
    faults = {fault.name: fault for fault in load()}
    try:
        unknown = {*args.names, *filter(None, [args.apply, args.revert])} - set(faults)
        if unknown:
            raise FaultError(f"there are no faults {sorted(unknown)}; --list prints all")
        if args.apply or args.run:
            check_clean(ROOT)
        if args.apply:
            faults[args.apply].apply()
        if args.revert:
            faults[args.revert].revert()
        if args.list:
            sys.stdout.writelines(f"{fault.name}  {fault.file}\n    {fault.why}\n" for fault in faults.values())
        return _run([faults[name] for name in args.names or faults], args) if args.run else 0
    except FaultError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
