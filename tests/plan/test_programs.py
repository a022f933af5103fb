"""Schedules from files, and steps that have fewer micro-batches than the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fold3d import ParallelConfig, schedule
from fold3d.errors import ConfigError
from fold3d.plan.programs import Programs
from fold3d.plan.resolve import programs_of, resolve_auto
from fold3d.schedule import Kind

M = 5


def config_of(folder: Path, name: str, pp: int = 3) -> ParallelConfig:
    uses_segments = next(info for info in schedule.registry() if info.name == name).uses_segments
    made = schedule.generate(name, pp=pp, segments=2 if uses_segments else 1, micro_batches=M)
    path = folder / "mine.csv"
    schedule.save_csv(made, path)
    return ParallelConfig(pp=pp, segments=made.segments, micro_batches=M, schedule=str(path))


def made_of(config: ParallelConfig, dp: int) -> Programs:
    return programs_of(config, resolve_auto(config, dp), dp)


@pytest.mark.parametrize("name", schedule.names())
def test_a_step_with_fewer_micro_batches_leaves_the_missing_ones_out(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, name)
    programs = made_of(config, 2)
    whole = programs.compute(M)
    (tmp_path / "mine.csv").unlink()  # read before training begins, not in its middle
    for fewer in range(1, M):
        short = programs.training(fewer)  # proved by lowering it
        assert short.micro_batches == fewer
        for mine, all_of_them in zip(programs.compute(fewer).ranks, whole.ranks, strict=True):
            assert mine == [action for action in all_of_them if action.micro_batch < fewer]
        for stage, rank in enumerate(short.ranks):
            own = [a for a in rank if a.kind == Kind.FORWARD]
            assert len(own) == fewer * config.segments and len(short.reduce_order(stage)) == config.segments


def test_a_step_with_more_micro_batches_does_not_fit(tmp_path: Path) -> None:
    programs = made_of(config_of(tmp_path, "gpipe"), 1)
    with pytest.raises(ConfigError, match=rf"= \(3, 1, {M}\), this step has \(3, 1, {M + 1}\)"):
        programs.compute(M + 1)


def test_a_file_for_other_micro_batches_does_not_fit(tmp_path: Path) -> None:
    settings = config_of(tmp_path, "gpipe")
    config = ParallelConfig(pp=3, segments=1, micro_batches=M - 1, schedule=settings.schedule)
    with pytest.raises(ConfigError, match="generate a file that fits"):
        made_of(config, 1).compute(M - 1)
