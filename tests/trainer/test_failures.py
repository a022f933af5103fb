"""A rank that fails in the middle of training ends the job on every rank, in time, with nothing half-written."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import transformers

from fold3d.errors import Fold3dError
from tests.helpers.launch import launch
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, error_of, run_fold3d

TIMEOUT = 6.0


class Raises(Variant):
    """compute_loss fails in the third step, after the model call: on the last stage only."""

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def compute_loss(self, *args: Any, **named: Any) -> Any:
                loss = super().compute_loss(*args, **named)
                if self.state.global_step == 2:
                    raise ArithmeticError("the loss went wrong")
                return loss

        return Trainer


@pytest.mark.gate
def test_an_error_in_compute_loss_reaches_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 2}
    job = Job(str(tmp_path), samples=40, arguments=arguments, variant=Raises())
    errors = ranks.run(error_of, 4, job, {"dp": 2, "pp": 2, "comm_timeout": TIMEOUT}, Fold3dError)
    for error in errors:
        assert "stage 1" in error and "ArithmeticError: the loss went wrong" in error, errors
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


class Signals(transformers.TrainerCallback):  # type: ignore[misc]
    """Sends its own process a signal, between two steps: the others wait where the stock loop gathers."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), self.signal_number)


class Signalled(Variant):
    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        return named | {"callbacks": [Signals(self.signal_number)]}


def train_until_signal(folder: str, signal_number: int, layout: dict[str, Any]) -> None:
    job = Job(folder, samples=40, variant=Signalled(signal_number))
    run_fold3d(job, layout | {"comm_timeout": TIMEOUT})


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=["dp", "pp"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_vanishes_between_steps(tmp_path: Path, name: str, layout: dict[str, Any]) -> None:
    number = getattr(signal, name)
    result = launch(train_until_signal, 2, str(tmp_path), int(number), layout, timeout=120)
    assert result[0].returncode not in (0, None) and not result[0].timed_out, result.report()
    assert result[1].stopped if name == "SIGSTOP" else result[1].returncode == -number
    assert result[0].seconds < 80 and not result.orphans, result.report()
    assert "rank 1" in result[0].stderr.splitlines()[-1], result.report()
