"""ControlFlags: what a callback on one process wants of the training loop, all processes do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from fold3d.engine.engine import Engine

logger = logging.getLogger(__name__)

_ENDS = ("should_training_stop", "should_epoch_stop")
_FLAGS = (*_ENDS, "should_save", "should_evaluate", "should_log")
_TOGETHER = ("on_train_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "on_evaluate", "on_save")
"""Events that all processes come to, and after which the loop may look at the flags."""


class ControlFlags:
    """Of the stock loop. A process that left it alone, or saved alone, would wait for the others, and they for it.

    One process may be the only one to see a stop file, a clock or a notebook's button, or to look at all, behind
    `if state.is_world_process_zero`. So the flags are compared where the loop is about to look at them: one that is set
    anywhere is set everywhere. That is one small exchange per step, and one more where a step logs.

    Within a step the loop looks at `_ENDS` after each micro-batch. They are compared there only where some process has
    a callback of the user's that may set them; else, set by something else such as a signal's handler, they count at
    the end of the step.

    What else all processes must know at the end of a step of any of them goes along, see `listen`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: dict[str, Callable[[], bool]] = {}
        self._heard: set[str] = set()
        self._held: set[str] = set()
        self._common: set[str] = set()  # set everywhere when they were compared last
        self._told: set[str] = set()
        self._compares_within = False

    def follow(self, event: str, control: Any, step: int, *, acts_within: bool) -> None:
        """What callbacks have set in `event` holds on all processes, as far as the loop looks at it before the next.

        Args:
            step: how many are done.
            acts_within: whether a callback of this process may set flags within a step.
        """
        if self._engine.topology.world == 1:
            self._heard = {what for what, is_so in self._asked.items() if is_so()}
            return
        if event in _TOGETHER or (event == "on_substep_end" and self._compares_within):
            self.compare(control, step, acts_within=acts_within)
        elif event in ("on_substep_end", "on_log"):  # one process may be the only one to log
            self._put_off(control, [flag for flag in _FLAGS if flag not in self._common])

    def listen(self, what: str, is_so: Callable[[], bool]) -> None:
        """`is_so` is asked whenever flags are compared; every process calls, in the same order."""
        self._asked[what] = is_so

    def heard(self, what: str) -> bool:
        """Whether it was so on any process when flags were compared last."""
        return what in self._heard

    def put_off_all_but_logs(self, control: Any) -> None:
        """Evaluation and checkpoint, also those that `on_log` asks for, wait for the next `compare`."""
        self._common -= {"should_save", "should_evaluate"}
        self._put_off(control, ["should_save", "should_evaluate"])

    def _put_off(self, control: Any, flags: list[str]) -> None:
        for flag in flags:
            if getattr(control, flag):
                self._held.add(flag)
                setattr(control, flag, False)

    def compare(self, control: Any, step: int, *, acts_within: bool) -> None:
        """A flag of `control` that is set on some process is set on all; every process calls."""
        world, rank = self._engine.topology.world, self._engine.topology.rank
        mine = [getattr(control, flag) or flag in self._held for flag in _FLAGS]
        self._held.clear()
        # The first rank that has set it, and the first that has not.
        wants = torch.tensor([[rank if one == is_set else world for one in mine] for is_set in (True, False)])
        also = [acts_within, *(is_so() for is_so in self._asked.values())]
        first = torch.cat([wants.flatten(), torch.tensor([rank if one else world for one in also])])
        with self._engine.supervise("comparing what callbacks want of the training", meets=True):
            self._engine.world.all_reduce(first, torch.minimum)
        ranks = first[: wants.numel()].tolist()
        acting, *heard = (first[wants.numel() :] < world).tolist()
        self._compares_within = acting
        self._heard = {what for what, is_so in zip(self._asked, heard, strict=True) if is_so}
        self._common = {flag for flag, wanting in zip(_FLAGS, ranks, strict=False) if wanting < world}
        for flag, wanting, other in zip(_FLAGS, ranks, ranks[len(_FLAGS) :], strict=False):
            setattr(control, flag, flag in self._common)
            if flag in self._common and other < world and flag not in self._told:
                self._told.add(flag)
                if rank == 0:
                    logger.warning(
                        "a callback has set %s on process %s and not on process %s, at step %s: all processes follow, "
                        "as they must act together (said once)",
                        flag,
                        wanting,
                        other,
                        step,
                    )
