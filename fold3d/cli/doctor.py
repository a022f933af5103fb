"""`fold3d doctor`: what was built, what the machine has, whether ranks reach each other and how fast; what to change.

Alone it looks at this host. Started by torchrun, as a training is, it looks at all ranks and what is between them.
"""

from __future__ import annotations

import argparse
from typing import Any

from fold3d.errors import ConfigError

_MOST_MB = 4096.0


def add(subcommands: Any) -> None:
    """Adds the subcommand to the parser."""
    made = subcommands.add_parser(
        "doctor",
        help="say what was built and what the machine has, and under torchrun check every pair of ranks",
        description=__doc__,
        epilog="Under torchrun: torchrun ... -m fold3d doctor on each node, with its arguments in the training.",
    )
    made.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="whose memory travels, default auto: GPUs where there are any",
    )
    made.add_argument("--size", type=float, default=16.0, metavar="MB", help="of a message, a copy, a sum, default 16")
    made.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="that a rank is waited for, default 60"
    )
    made.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints what was found, on rank 0. Raises: ConfigError for values out of range; RankError."""
    if not 0 < options.size <= _MOST_MB:
        raise ConfigError(f"--size is {options.size:g}; it must be positive, and {_MOST_MB:g} at most")
    if not 0 < options.timeout < 1e6:
        raise ConfigError(f"--timeout is {options.timeout:g}; it must be a positive number of seconds")
    from fold3d.doctor.examination import examine

    def say(line: str) -> None:
        print(line, flush=True)

    examine(say, device=options.device, size=round(options.size * 1e6), timeout=options.timeout)
