"""Both ways with torch.distributed.pipelining: its loader and validator take our CSV, ours take its."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn import Module

from fold3d import schedule
from fold3d.errors import ConfigError
from fold3d.schedule import Action, Kind, Schedule
from tests.schedule.cases import variants

SIZES = [(1, 1, 3), (2, 1, 4), (2, 2, 3), (3, 2, 7), (4, 1, 2), (4, 2, 8), (4, 3, 5)]


def stages(pp: int, segments: int) -> list[SimpleNamespace]:
    """What a schedule of torch reads of rank 0's stages; no process group, no model."""
    return [
        SimpleNamespace(stage_index=s * pp, num_stages=pp * segments, group_size=pp, group_rank=0, submod=Module())
        for s in range(segments)
    ]


def texts(ranks) -> list[list[str]]:
    return [[str(action) for action in rank if action is not None] for rank in ranks]


@pytest.mark.parametrize("pp, segments, m", SIZES)
def test_torch_loads_and_lowers_our_csv(tmp_path, pp: int, segments: int, m: int):
    for arguments in variants(pp, segments, m):
        made = schedule.generate(**arguments)
        schedule.save_csv(made, tmp_path / "compute.csv")
        runtime = torch_schedules._PipelineScheduleRuntime(stages(pp, segments), m)
        runtime._load_csv(str(tmp_path / "compute.csv"))  # validates, then adds torch's own communication
        assert texts(runtime.pipeline_order.values()) == texts(made.ranks)


@pytest.mark.parametrize("pp, segments, m", SIZES)
def test_torch_runs_our_communication_dry(tmp_path, pp: int, segments: int, m: int):
    for arguments in variants(pp, segments, m):
        lowered = schedule.lower(schedule.generate(**arguments), reduce=False)
        schedule.save_csv(lowered, tmp_path / "comms.csv")
        runtime = torch_schedules._PipelineScheduleRuntime(stages(pp, segments), m)
        runtime._load_csv(str(tmp_path / "comms.csv"), format="compute_comms")
        assert texts(runtime.pipeline_order_with_comms.values()) == texts(lowered.ranks)
        runtime._simulate()


def repaired(loaded: Schedule, m: int) -> Schedule:
    """torch 2.13's Schedule1F1B counts the forwards of its last rank from 1 in the order it shows (not in what it
    runs); our validator finds that. Returns the schedule with them counted from 0."""
    last = loaded.pp - 1
    with pytest.raises(ConfigError, match="is missing"):
        schedule.validate(loaded)
    ranks = loaded.ranks
    ranks[last] = [Action(a.chunk, a.kind, a.micro_batch - 1) if a.kind == Kind.FORWARD else a for a in ranks[last]]
    return Schedule(loaded.pp, 1, m, ranks)


@pytest.mark.parametrize("pp, m", [(1, 1), (1, 4), (2, 2), (2, 5), (4, 4), (4, 9)])
@pytest.mark.parametrize("name, torch_class", [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_single_stage_schedules_are_torchs(tmp_path, name: str, torch_class: str, pp: int, m: int):
    theirs = getattr(torch_schedules, torch_class)(stages(pp, 1)[0], m)
    torch_schedules._PipelineScheduleRuntime._dump_csv(theirs, str(tmp_path / "t.csv"), "compute_only")
    loaded = schedule.load_csv(tmp_path / "t.csv")
    if name == "1f1b":
        loaded = repaired(loaded, m)
    schedule.validate(loaded)  # with torch's REDUCE_GRAD cells
    ours = schedule.generate(name, pp=pp, micro_batches=m)
    assert [[a for a in rank if a.kind.is_compute] for rank in loaded.ranks] == ours.ranks
    assert schedule.lower(loaded, reduce=False) == schedule.lower(ours, reduce=False)


@pytest.mark.parametrize("pp, segments, m", [(2, 2, 2), (2, 2, 4), (4, 2, 3), (4, 2, 8), (4, 3, 10), (3, 2, 5)])
def test_interleaved_is_torchs(tmp_path, pp: int, segments: int, m: int):
    theirs = torch_schedules.ScheduleInterleaved1F1B(stages(pp, segments), m)
    theirs._dump_csv(str(tmp_path / "t.csv"), "compute_only")
    loaded = schedule.load_csv(tmp_path / "t.csv")
    schedule.validate(loaded)
    assert loaded == schedule.generate("interleaved", pp=pp, segments=segments, micro_batches=m)


@pytest.mark.parametrize(
    "torch_class", ["ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]
)
@pytest.mark.parametrize("pp, segments, m", [(2, 2, 4), (4, 2, 8), (4, 3, 4)])
def test_ours_accepts_theirs(tmp_path, torch_class: str, pp: int, segments: int, m: int):
    theirs = getattr(torch_schedules, torch_class)(stages(pp, segments), m)
    theirs._dump_csv(str(tmp_path / "t.csv"), "compute_only")
    loaded = schedule.load_csv(tmp_path / "t.csv")
    assert (loaded.pp, loaded.segments, loaded.micro_batches) == (pp, segments, m)
    schedule.validate(loaded)
    schedule.validate(schedule.lower(loaded, reduce=True))
    assert schedule.parse_csv(loaded.csv()) == loaded


@pytest.mark.parametrize("torch_class", ["ScheduleLoopedBFS", "ScheduleInterleaved1F1B"])
def test_ours_accepts_their_communication(tmp_path, torch_class: str):
    theirs = getattr(torch_schedules, torch_class)(stages(4, 2), 8)
    theirs.pipeline_order_with_comms = {
        rank: [a for a in actions if "SHARD" not in str(a)]
        for rank, actions in theirs.pipeline_order_with_comms.items()
    }
    theirs._dump_csv(str(tmp_path / "t.csv"), "compute_comms")
    schedule.validate(schedule.load_csv(tmp_path / "t.csv"))


def test_a_breadth_first_schedule_of_theirs_differs_in_the_backward_only():
    """torch's LoopedBFS takes the micro-batches backwards in its backward, AIAO (Algorithm 1) forwards."""
    theirs = torch_schedules.ScheduleLoopedBFS(stages(2, 2), 3)
    ours = schedule.generate("aiao", pp=2, segments=2, micro_batches=3)
    for rank in range(2):
        their_texts = [str(a) for a in theirs.pipeline_order[rank] if a is not None]
        our_texts = [a.text for a in ours.ranks[rank]]
        assert their_texts[:6] == our_texts[:6]
        assert their_texts[6:] == our_texts[6:9][::-1] + our_texts[9:][::-1]
