"""The exceptions that fold3d raises on purpose; any other is a bug of fold3d or an error of the user's code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Fold3dError(Exception):
    """Base class of every error fold3d raises on purpose."""

    is_everywhere = True
    """Whether every rank raises it by itself, so that it need not be sent to the others."""


class ConfigError(Fold3dError, ValueError):
    """A setting has a value that cannot work; the message names the value, the reason and what to change."""


class NotRecordedError(ConfigError):
    """Something needs the model recorded before there was a micro-batch, and none can be made up."""


class MemoryLimitError(ConfigError):
    """No layout was found that needs as little memory as `memory_limit`; raised on every rank."""


class TraceError(Fold3dError, ValueError):
    """The model cannot be cut into chunks; the message says what was found and which setting helps."""


class CheckpointError(Fold3dError, ValueError, RuntimeError):
    """A checkpoint is missing, cut short or belongs to another model."""


class MissingWeightsError(Fold3dError, RuntimeError):
    """Code read the values of weights that lie in other processes; the message names the call to use."""

    is_everywhere = False


class RankError(Fold3dError, RuntimeError):
    """A rank failed in a step: names the rank, the action it was in and the cause. Raised on every rank."""


WAYS_OUT = (
    "Set pp=1 and segments=1, where nothing is cut and all outputs are there; or use fewer chunks (pp * segments), or "
    "compute it from what the model returns at its end"
)
"""Advice in errors about a value that another chunk has."""


class SplitError(Fold3dError, RuntimeError):
    """A chunk ran in another way than was recorded; the message names the module, the reason and what to change."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" with the name of `known` nearest to `word`; empty where none is near."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
