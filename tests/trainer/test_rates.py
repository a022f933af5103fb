"""RatesCallback: rates.json beside the checkpoints, for `fold3d cluster`."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

import fold3d
from fold3d.cluster.rates import Measured, Measurement
from fold3d.errors import ConfigError
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, run_fold3d

OLDER = Measurement("t4", 1, 5.0)


class Measuring(Variant):
    """Started as by `fold3d cluster`, on two GPUs of a kind; the file has an older measurement of another."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        os.environ.update(FOLD3D_KIND="a100", FOLD3D_GPUS="2", FOLD3D_STARTED=str(time.time() - 100.0))
        made = fold3d.RatesCallback()
        for variable in ("FOLD3D_KIND", "FOLD3D_GPUS", "FOLD3D_STARTED"):
            del os.environ[variable]
        return named | {"callbacks": [made]}


@pytest.mark.gate
def test_what_was_measured_is_beside_the_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    """Two stages: one rate for both processes; of tokens, padding included, as many as the batches have."""
    path = tmp_path / "rates.json"
    Measured(rates=(OLDER,)).write(path)
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 5}
    job = Job(str(tmp_path), arguments=arguments, variant=Measuring())
    ranks.run(run_fold3d, 2, job, {"pp": 2})
    found = Measured.read(path)
    assert found.rates[0] == OLDER and len(found.rates) == 2
    new = found.rates[1]
    assert (new.kind, new.gpus, new.layout) == ("a100", 2, "dp1 tp1 pp2")
    assert new.rate > 0 and 0.03 <= new.error < 10
    assert 100.0 < found.start_seconds < 3700.0 and 0.0 < found.save_seconds < 3600.0
    # Six steps of two micro-batches of two samples of at most eleven tokens; all steps are done.
    assert 0 < found.done <= 6 * 2 * 2 * 11 * 3 and found.left == 0.0


def test_another_file_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text("[]")
    args = fold3d.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=r"rates\.json is \[\]; it must be an object"):
        fold3d.RatesCallback("x").on_train_begin(args, None, None)
    assert math.isinf(Measured().left)
