"""The step's timeline: trace events, arrows, picture, and files that are whole or absent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fold3d.errors import ConfigError
from fold3d.observe.step_breakdown import RawRecord
from fold3d.observe.timeline import summary, write_atomically, write_trace
from fold3d.observe.timeline_picture import write_picture
from fold3d.plan.cluster_model import ClusterCosts, Work
from fold3d.plan.memory import even_curves
from fold3d.schedule import generate, lower

MS = 1_000_000


def record(lane: str, action: str, start: int, end: int, size: int = 0) -> RawRecord:
    """One record in milliseconds, on a clock with an odd origin."""
    origin = -7_777_777
    return lane, action, origin + start * MS, origin + end * MS, size


def two_stages() -> list[list[RawRecord]]:
    """One micro-batch through two stages:

    stage 0   0F0 [0-10]                        wait [10-50]            0B0 [50-70]  sum [70-90], wait [70-90]
    stage 1   wait [0-12]  1F0 [12-22]  1B0 [22-42]   sum [42-62], of which nothing is under computation
    """
    return [
        [
            record("compute", "0F0", 0, 10),
            record("send_f", "0SEND_F0", 10, 12, 1 << 20),
            record("wait", "0RECV_B0", 10, 50),
            record("recv_b", "0RECV_B0", 43, 49, 1 << 20),
            record("compute", "0B0", 50, 70),
            record("reduce", "0REDUCE_GRAD", 70, 90, 2 << 20),
            record("wait", "0REDUCE_GRAD", 70, 90),
        ],
        [
            record("wait", "1RECV_F0", 0, 12),
            record("recv_f", "1RECV_F0", 11, 12, 1 << 20),
            record("compute", "1F0", 12, 22),
            record("compute", "1B0", 22, 42),
            record("send_b", "1SEND_B0", 42, 49, 1 << 20),
            record("reduce", "1REDUCE_GRAD", 42, 62, 2 << 20),
        ],
    ]


RECORDS = two_stages() + two_stages()


def test_trace_has_every_action_on_its_lane(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "step.json"
    write_trace(path, RECORDS, pp=2)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 0] == "compute" and names[3, 6] == "reduce"
    lanes = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert set(names) == lanes, "no lane is empty"
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes[3] == "rank 3 (dp 1, stage 1)"

    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(rank) for rank in RECORDS)
    assert min(e["ts"] for e in slices) == 0.0, "the trace starts at the first event"
    backward = next(e for e in slices if e["name"] == "1B0" and e["pid"] == 3)
    waits = {e["name"]: e["cname"] for e in slices if e["cat"] == "wait"}
    assert waits["0REDUCE_GRAD"] == "terrible" and waits["1RECV_F0"] == "grey"
    assert (backward["ts"], backward["dur"], backward["cat"]) == (22_000.0, 20_000.0, "backward")
    assert backward["args"] == {"chunk": 1, "segment": 0, "micro_batch": 0, "bytes": 0}
    assert trace["otherData"]["summary"] == summary(RECORDS)


def test_trace_has_the_account_of_each_rank_and_the_prediction(tmp_path: Path) -> None:
    write_trace(tmp_path / "step.json", RECORDS, pp=2, predicted_ms=61.5)
    trace = json.loads((tmp_path / "step.json").read_text())
    about = trace["otherData"]
    assert about["predicted_step_ms"] == 61.5 and "(predicted 61.5)" in about["summary"]
    assert set(about["breakdowns"]) == {"0", "1", "2", "3"}
    for rank, breakdown in about["breakdowns"].items():
        own = [end - start for lane, _, start, end, _ in RECORDS[int(rank)] if lane == "compute"]
        assert breakdown["compute_ms"] == pytest.approx(sum(own) / 1e6, abs=0.1)
        label = next(
            e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels" and e["pid"] == int(rank)
        )
        assert f"DP.sync exposed {breakdown['dp_exposed_ms']:.1f}, hidden {breakdown['dp_hidden_ms']:.1f} ms" in label
        assert f"PP.sync exposed {breakdown['pp_exposed_ms']:.1f}, hidden {breakdown['pp_hidden_ms']:.1f} ms" in label
        assert f"bubble {breakdown['bubble_ms']:.1f} ms" in label


def test_memory_is_a_track_of_each_rank_by_its_stage(tmp_path: Path) -> None:
    schedule = lower(generate("1f1b", pp=2, micro_batches=3), reduce=True)
    work = Work.even(schedule, forward=0.01, backward=0.02, layers=4, activation_bytes=64, gradient_bytes=4096)
    curves = even_curves(schedule, work, ClusterCosts(dp=2, bandwidth=1e9), 1 << 20, dp_sync="early")
    write_trace(tmp_path / "step.json", RECORDS, pp=2, memory=curves)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    for rank in range(4):
        track = [e for e in events if e["ph"] == "C" and e["pid"] == rank]
        curve = curves[rank % 2]
        assert {e["name"] for e in track} == {"memory, predicted"}
        assert [e["ts"] for e in track] == [point.time_ns / 1000 for point in curve.points]
        assert max(sum(e["args"].values()) for e in track) == curve.peak.device
    assert curves[0].peak.device > curves[1].peak.device


def test_arrows_join_each_send_to_its_receive(tmp_path: Path) -> None:
    write_trace(tmp_path / "step.json", RECORDS, pp=2)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    arrows: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    ends = sorted((a["s"]["name"], a["s"]["pid"], a["f"]["pid"]) for a in arrows.values())
    assert ends == [("0SEND_F0", 0, 1), ("0SEND_F0", 2, 3), ("1SEND_B0", 1, 0), ("1SEND_B0", 3, 2)]
    slices = {(e["pid"], e["tid"]): e for e in events if e["ph"] == "X" and e["tid"] >= 2}
    for arrow in arrows.values():
        for end in arrow.values():
            inside = slices[end["pid"], end["tid"]]
            assert inside["ts"] <= end["ts"] < inside["ts"] + inside["dur"]
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]


def test_folded_chunks_wrap_around_to_stage_0(tmp_path: Path) -> None:
    """Chunk 1 (segment 0, stage 1) sends to chunk 2 (segment 1, stage 0)."""
    records = [
        [record("recv_f", "2RECV_F0", 5, 6), record("compute", "2F0", 6, 9)],
        [record("compute", "1F0", 0, 4), record("send_f", "1SEND_F0", 4, 6)],
    ]
    write_trace(tmp_path / "step.json", records, pp=2)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [(e["ph"], e["pid"]) for e in events if e["ph"] in "sf"] == [("s", 1), ("f", 0)]
    folded = next(e for e in events if e["name"] == "2F0")
    assert folded["args"]["segment"] == 1


def test_summary_tells_where_the_time_went() -> None:
    # Of 90 ms: compute 30 on every rank; waits for stages 40 and 12, of which messages arrive in 6 and 1; final wait
    # 20 and 0; no sum is hidden.
    assert summary(RECORDS) == (
        "step 90.0 ms on 4 rank(s): compute 33.3 %, bubble 25.0 %, exposed PP.sync 3.9 %, "
        "exposed DP.sync 11.1 %, hidden DP.sync 0.0 %; PP 4.0 MiB, DP 8.0 MiB"
    )
    assert summary([[], []]) == "nothing was recorded"


def test_unknown_lane_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lane 'radio' of '0F0' is none of compute, wait"):
        write_trace(tmp_path / "step.json", [[record("radio", "0F0", 0, 1)]], pp=1)
    assert not list(tmp_path.iterdir())


def test_picture(tmp_path: Path) -> None:
    write_picture(tmp_path / "step.png", RECORDS, pp=2, title="step 3")
    image = (tmp_path / "step.png").read_bytes()
    assert image.startswith(b"\x89PNG") and image.rstrip().endswith(b"IEND\xaeB`\x82")
    write_picture(tmp_path / "none.png", [[], []], pp=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["none.png", "step.png"]


def test_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        write_picture(tmp_path / "step.png", RECORDS, pp=2)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text("old")

    def fail(temporary: str) -> None:
        Path(temporary).write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def pixels(path: Path) -> tuple[int, int, int]:
    """Returns the height of a picture, and how many of its pixels have the colours of exposed DP.sync and bubble."""
    from matplotlib.image import imread

    image = (imread(path)[..., :3] * 255).round().astype(int)
    red = (image == (0xE4, 0x14, 0x1C)).all(-1).sum()
    grey = (image == (0xDC, 0xDC, 0xDC)).all(-1).sum()
    return image.shape[0], int(red), int(grey)


def test_exposed_dp_sync_is_red_and_the_bubble_grey(tmp_path: Path) -> None:
    """Of the four ranks' 360 ms, 40 are waits for DP.sync and 104 for stages."""
    write_picture(tmp_path / "step.png", RECORDS, pp=2)
    _, red, grey = pixels(tmp_path / "step.png")
    assert red / grey == pytest.approx(40 / 104, rel=0.1)


def test_a_wait_inside_a_forward_is_seen(tmp_path: Path) -> None:
    records = [[record("compute", "0F0", 0, 10), record("wait", "0GATHER", 2, 6)]]
    write_picture(tmp_path / "step.png", records, pp=1)
    assert pixels(tmp_path / "step.png")[1] > 1000


def test_a_lane_without_events_has_no_row(tmp_path: Path) -> None:
    alone = [[record("compute", "0F0", 0, 10), record("compute", "0B0", 10, 30)]]
    write_picture(tmp_path / "alone.png", alone, pp=1)
    write_picture(tmp_path / "full.png", [RECORDS[0]], pp=1)
    assert pixels(tmp_path / "alone.png")[0] < pixels(tmp_path / "full.png")[0] - 40
    write_picture(tmp_path / "other.png", [RECORDS[0], *alone], pp=1)
    more = pixels(tmp_path / "other.png")[0] - pixels(tmp_path / "full.png")[0]
    assert more < 0.75 * 110, "what another rank has needs no row of this one"


def sharded() -> list[RawRecord]:
    """A forward of 30 ms, of which it waits for TP.sync in 10."""
    return [
        record("compute", "0F0", 0, 30),
        record("tp_sync", "all-reduce", 5, 20, 3 << 20),
        record("wait", "TP_SYNC", 10, 20),
    ]


def test_tp_sync_has_a_row_and_a_place_in_the_account(tmp_path: Path) -> None:
    records = [sharded(), sharded()]
    write_trace(tmp_path / "step.json", records, pp=1, tp=2)
    trace = json.loads((tmp_path / "step.json").read_text())
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 1}
    (sync,) = [e for e in slices if names[e["tid"]] == "tp_sync"]
    assert (sync["ts"], sync["dur"], sync["args"]["bytes"]) == (5_000.0, 15_000.0, 3 << 20)
    (wait,) = [e for e in slices if names[e["tid"]] == "wait"]
    assert wait["cname"] == "bad"
    for breakdown in trace["otherData"]["breakdowns"].values():
        assert (breakdown["compute_ms"], breakdown["tp_exposed_ms"], breakdown["tp_hidden_ms"]) == (20, 10, 5)
    (label,) = [e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels" and e["pid"] == 1]
    assert label.startswith("TP.sync exposed 10.0, hidden 5.0 ms; ")
    about = summary(records)
    assert "exposed TP.sync 33.3 %, hidden TP.sync 16.7 %" in about and about.endswith("TP 6.0 MiB")
    assert "TP" not in summary(RECORDS), "nothing is said where there is none"


def test_exposed_tp_sync_is_dark_red_with_a_row_below(tmp_path: Path) -> None:
    from matplotlib.image import imread

    write_picture(tmp_path / "step.png", [sharded()], pp=1, tp=2)
    write_picture(tmp_path / "alone.png", [sharded()[:1]], pp=1, tp=2)
    assert pixels(tmp_path / "step.png")[0] > pixels(tmp_path / "alone.png")[0] + 10
    image = (imread(tmp_path / "step.png")[..., :3] * 255).round().astype(int)
    waits, row = ((image == colour).all(-1) for colour in ((0x7A, 0x00, 0x10), (0xB8, 0x86, 0x0B)))
    assert waits.any(0).sum() / row.any(0).sum() == pytest.approx(10 / 15, rel=0.5), "the legend has both, too"
    assert pixels(tmp_path / "step.png")[1] == 0, "none waits for DP.sync"
