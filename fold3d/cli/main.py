"""`fold3d`: plans, checks and launches trainings; draws schedules; shares GPUs among jobs."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fold3d import __version__
from fold3d.cli import cluster, cost, doctor, launch, plan, schedules, simulate, trace
from fold3d.cli.answers import Answer
from fold3d.errors import Fold3dError, did_you_mean

_NEW_OBJECTS = 1_000_000


class Parser(argparse.ArgumentParser):
    """argparse's, which suggests the nearest name for a misspelt command, option or choice.

    Parsers of subcommands are of this class too: argparse takes that of their parent.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown option is an error of the subcommand that does not know it."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            name = rest[0].partition("=")[0]
            self.error(f"unrecognized arguments: {' '.join(rest)}{did_you_mean(name, self._option_string_actions)}")
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(one) for one in action.choices]
            near = did_you_mean(str(value), names)
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(names)}{near}")


def parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Returns the command's parser; each subcommand stores its function as `run`.

    Args:
        words: of the command line, if they are known: what takes long to list is then listed only if it is asked for.
    """
    command = Parser(prog="fold3d", description=__doc__)
    command.add_argument("--version", action="version", version=f"fold3d {__version__}")
    subcommands = command.add_subparsers(metavar="COMMAND", required=True)
    for module in (schedules, simulate, trace, doctor, launch, cluster, cost):
        module.add(subcommands)
    plan.add(subcommands, knobs=words is None or "plan" in words)
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns 0, or 1 after an error whose text went to stderr."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    answer = Answer(words)
    known = answer.find()
    if known is not None:
        return _print(known)
    try:
        with _few_collections(for_good=arguments is None):
            options = parser(words).parse_args(words)
            answer.keep(lambda: options.run(options))
    except Fold3dError as error:
        print(f"fold3d: {str(error).rstrip()}", file=sys.stderr)
        return 1
    except MemoryError:
        print(
            "fold3d: this needs more memory than there is; ask for fewer layers, ranks or micro-batches",
            file=sys.stderr,
        )
        return 1
    except BrokenPipeError:  # `fold3d draw ... | head`
        sys.stderr.close()
        return 1
    return 0


@contextmanager
def _few_collections(*, for_good: bool) -> Iterator[None]:
    """Python looks for cycles of unused objects after a million new ones, no longer after 700: a command that loads
    torch and makes a model of thousands of modules, and then ends, has little of the former and much of the latter.

    Args:
        for_good: the process ends behind it, and does not look for any then: the memory goes with it.
    """
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if for_good:
            gc.freeze()


def _print(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
