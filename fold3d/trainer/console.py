"""The console's line for a logged step: what the log has of it, in words. Everything else gets the log as it is."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerState
from transformers.trainer_callback import CallbackHandler

_PARTS = {
    "compute_ms": "compute",
    "tp_exposed_ms": "TP.sync",
    "bubble_ms": "bubble",
    "pp_exposed_ms": "PP.sync",
    "dp_exposed_ms": "DP.sync",
    "offload_exposed_ms": "offload",
    "other_ms": "other",
}
"""Keys of the breakdown that add up to step_ms, and what the line calls them."""
_SAID = {
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "tokens_per_second",
    "step_ms",
    "peak_memory_gb",
    "mfu",
    "skipped_steps",
    *_PARTS,
}
_LEFT_OUT = {"tp_hidden_ms", "pp_hidden_ms", "dp_hidden_ms", "preemptions", "pp_delayed_ms", "dp_held_ms"}
_LEFT_OUT |= {"offload_hidden_ms", "offload_gb", "peak_memory_mb", "peak_memory_rank", "loss_scale"}


def step_line(logs: Mapping[str, Any], state: TrainerState) -> str:
    """Returns one line for a training step's log; its percentages add up to the step.

    Keys that neither fold3d nor the stock Trainer writes stand at its end as they are.
    """
    words = [f"step {state.global_step}/{state.max_steps}" if state.max_steps > 0 else f"step {state.global_step}"]
    for key, name in (("loss", "loss"), ("grad_norm", "grad"), ("learning_rate", "lr")):
        if key in logs:
            words.append(f"{name} {_short(logs[key])}")
    if "tokens_per_second" in logs:
        words.append(f"{logs['tokens_per_second']:.0f} tok/s")
    words.append(f"{logs['step_ms']:.0f} ms")
    if "peak_memory_gb" in logs:
        words.append(f"{logs['peak_memory_gb']:.1f} GB")
    if "mfu" in logs:
        words.append(f"MFU {100 * logs['mfu']:.0f} %")
    if logs.get("skipped_steps"):
        words.append(f"{logs['skipped_steps']} steps skipped")
    parts = {name: logs[key] for key, name in _PARTS.items() if key in logs}
    for name, percent in _percentages(parts).items():
        words.append(f"{name} {percent} %{_hiding(logs, name)}")
    for key, value in logs.items():
        if key not in _SAID | _LEFT_OUT and not key.startswith("predicted_"):
            words.append(f"{key} {_short(value)}")
    return "  ".join(words)


def _hiding(logs: Mapping[str, Any], part: str) -> str:
    if part not in ("TP.sync", "DP.sync"):
        return ""
    axis = part[:2].lower()
    exposed, hidden = logs[f"{axis}_exposed_ms"], logs.get(f"{axis}_hidden_ms", 0.0)
    if exposed + hidden <= 0:
        return ""
    return f" ({100 * hidden / (exposed + hidden):.0f} % hidden, {exposed:.0f} ms exposed)"


def _percentages(parts: Mapping[str, float]) -> dict[str, int]:
    """Returns whole percentages that add up to 100: those cut off most are rounded up."""
    whole = sum(parts.values())
    if whole <= 0:
        return {}
    exact = {name: 100 * value / whole for name, value in parts.items()}
    rounded = {name: int(value) for name, value in exact.items()}
    missing = 100 - sum(rounded.values())
    for name in sorted(exact, key=lambda name: rounded[name] - exact[name])[:missing]:
        rounded[name] += 1
    return rounded


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def printing_lines(handler: CallbackHandler) -> Iterator[None]:
    """In its body the stock callbacks that print logs print `step_line`; a callback of the user's is left alone.

    They stay the objects and the classes that the stock Trainer has, which others look for.
    """
    changed = []
    for callback in handler.callbacks:
        for kind, write in ((ProgressCallback, _above_bar), (PrinterCallback, _on_stdout)):
            if type(callback).on_log is kind.on_log and "on_log" not in vars(callback):
                vars(callback)["on_log"] = functools.partial(write, callback)
                changed.append(callback)
    try:
        yield
    finally:
        for callback in changed:
            del vars(callback)["on_log"]


def _above_bar(callback: Any, _args: Any, state: TrainerState, _control: Any, logs: Any = None, **_: Any) -> None:
    if state.is_world_process_zero and callback.training_bar is not None:
        callback.training_bar.write(step_line(logs, state))


def _on_stdout(_callback: Any, _args: Any, state: TrainerState, _control: Any, logs: Any = None, **_: Any) -> None:
    if state.is_local_process_zero:
        sys.stdout.write(f"{step_line(logs, state)}\n")
