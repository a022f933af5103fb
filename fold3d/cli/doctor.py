"""`fold3d doctor`: checks this host; under torchrun all ranks, the links between them and their speeds.

It prints what is installed, what was measured and what to change.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from fold3d.errors import ConfigError

_MOST_MB = 4096.0


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    command = subcommands.add_parser(
        "doctor",
        help="check this host; under torchrun check every pair of ranks",
        description=__doc__,
        epilog="Several ranks: torchrun ... -m fold3d doctor on each node, with the arguments of the training.",
    )
    command.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="whose memory is copied and sent; default auto: GPUs where there are any",
    )
    command.add_argument(
        "--size", type=float, default=16.0, metavar="MB", help="size of a message, a copy and a collective, default 16"
    )
    command.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="how long to wait for a rank, default 60"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints what was found, on rank 0. Raises: ConfigError for values out of range; RankError."""
    if not 0 < options.size <= _MOST_MB:
        raise ConfigError(f"--size is {options.size:g}; it must be positive, and {_MOST_MB:g} at most")
    if not 0 < options.timeout < 1e6:
        raise ConfigError(f"--timeout is {options.timeout:g}; it must be a positive number of seconds")
    from fold3d.doctor.examination import examine

    def say(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    def report(found: dict[str, Any]) -> None:
        if options.json:
            print(json.dumps(found, indent=2), flush=True)

    examine(say, device=options.device, size=round(options.size * 1e6), timeout=options.timeout, report=report)
