"""The console's line for a logged step: what the log has of it, in words. Everything else gets the log as it is."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerState
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler

_WIDTH = 100
_WAITS = {
    "tp_exposed_ms": "TP",
    "bubble_ms": "bubble",
    "pp_exposed_ms": "PP",
    "dp_exposed_ms": "DP",
    "offload_exposed_ms": "offload",
    "other_ms": "other",
}
"""Parts of step_ms beside computing, and what the line calls them."""
_STOCK = {"loss": "loss", "grad_norm": "grad", "learning_rate": "lr"}
_SPEED: Mapping[str, Callable[[Any], str]] = {
    "tokens_per_second": lambda value: f"{_thousands(value)} tok/s",
    "step_ms": lambda value: f"{value:.0f} ms",
    "peak_memory_gb": lambda value: f"{value:.1f} GB",
    "mfu": lambda value: f"MFU {100 * value:.0f}%",
    "skipped_steps": lambda value: f"{value} skipped" if value else "",
}


def step_line(logs: Mapping[str, Any], state: TrainerState, measured: Collection[str] = ()) -> str:
    """Returns one line of at most _WIDTH characters for a training step's log: the step, the loss, the speed, what the
    user's own code logs, and the shares of the step that it waited, the longest first. What finds no room is in the
    log.

    Args:
        measured: keys that are fold3d's.
    """
    step = f"step {state.global_step}/{state.max_steps}" if state.max_steps > 0 else f"step {state.global_step}"
    line = step + (f" epoch {logs['epoch']:.2f}" if "epoch" in logs else "")
    numbers = [f"{name} {_short(logs[key])}" for key, name in _STOCK.items() if key in logs]
    speeds = [word for key, say in _SPEED.items() if key in logs and (word := say(logs[key]))]
    own = [f"{key} {_short(value)}" for key, value in logs.items() if key not in {"epoch", *_STOCK, *measured}]
    shares = {name: logs[key] / max(logs["step_ms"], 1e-9) for key, name in _WAITS.items() if key in logs}
    waits = sorted(shares.items(), key=lambda one: (one[0] == "other", -one[1]))
    for words in (numbers, speeds, own, [f"{name} {100 * share:.0f}%" for name, share in waits if share >= 0.01]):
        gap = "  "
        for word in words:
            if len(line) + len(gap) + len(word) <= _WIDTH:
                line, gap = f"{line}{gap}{word}", " "
    return line


def _thousands(value: float) -> str:
    return f"{value:.0f}" if value < 1e5 else f"{value / 1e3:.0f}k"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def printing_lines(handler: CallbackHandler, measured: Collection[str]) -> Iterator[None]:
    """In its body the stock callbacks that print logs print `step_line`, and those that report to W&B, TensorBoard and
    others put the keys in `measured` into groups; a callback of the user's is left alone.

    They stay the objects and the classes that the stock Trainer has, which others look for.
    """
    changed = []
    for callback in handler.callbacks:
        for kind, write in ((ProgressCallback, _above_bar), (PrinterCallback, _on_stdout)):
            if type(callback).on_log is kind.on_log and "on_log" not in vars(callback):
                vars(callback)["on_log"] = functools.partial(write, callback, measured)
                changed.append(callback)
    reporting: Any = integration_utils
    stock = reporting.rewrite_logs

    def rewrite(logs: Mapping[str, Any]) -> dict[str, Any]:
        rest: dict[str, Any] = stock({key: value for key, value in logs.items() if key not in measured})
        return rest | {f"{group_of(key)}/{key}": value for key, value in logs.items() if key in measured}

    reporting.rewrite_logs = rewrite
    try:
        yield
    finally:
        reporting.rewrite_logs = stock
        for callback in changed:
            del vars(callback)["on_log"]


def group_of(key: str) -> str:
    """Returns the group in which reporters show a key of fold3d's: memory, comm, perf or train."""
    if "memory" in key or key.startswith("offload"):
        return "memory"
    if key.removeprefix("predicted_").startswith(("tp_", "pp_", "dp_")) or key == "preemptions":
        return "comm"
    return "train" if key in ("loss_scale", "skipped_steps") else "perf"


def _above_bar(
    callback: Any, measured: Any, _args: Any, state: TrainerState, _control: Any, logs: Any = None, **_: Any
) -> None:
    if state.is_world_process_zero and callback.training_bar is not None:
        callback.training_bar.write(step_line(logs, state, measured))


def _on_stdout(
    _callback: Any, measured: Any, _args: Any, state: TrainerState, _control: Any, logs: Any = None, **_: Any
) -> None:
    if state.is_local_process_zero:
        sys.stdout.write(f"{step_line(logs, state, measured)}\n")
