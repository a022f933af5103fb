"""Parser: argparse that suggests the nearest name for a misspelt command, option or choice."""

from __future__ import annotations

import argparse
import os
from typing import Any

from fold3d.errors import did_you_mean

_PICTURES = (".png", ".svg", ".pdf")


def picture(text: str) -> str:
    """Returns the name of a picture's file, whose suffix says its format; the `type` of such an option."""
    if os.path.splitext(text)[1] not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
    return text


class Parser(argparse.ArgumentParser):
    """Parsers of subcommands are of this class too: argparse takes that of their parent."""

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
