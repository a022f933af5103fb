"""`fold3d cluster`, as a user types it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fold3d.cli.main import main

pytest.importorskip("scipy", reason="policies need fold3d[cluster]")

ROOT = Path(__file__).parents[2]
DAY = ROOT / "examples" / "cluster_day.json"
GPUS = "--gpus a100:8@2.5,l4:8@0.7,t4:8@0.35"


def run(capsys, line: str) -> tuple[int, str, str]:
    code = main(shlex.split(f"cluster simulate {line}"))
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def table(out: str) -> dict[str, list[str]]:
    """Returns the cells of each row, by the label before them."""
    rows = out.splitlines()[2:]
    return {row[: len(row) - len(row.lstrip())] + row.split("  ")[0]: row.split("  ", 1)[1].split() for row in rows}


def test_policies_side_by_side(capsys, tmp_path: Path) -> None:
    """The day of docs/cluster.md: who knows of kinds is faster; who saves money is cheaper, and meets the deadlines."""
    png = tmp_path / "day.png"
    code, out, err = run(capsys, f"{DAY} {GPUS} --policy fair:blind --policy fair --policy cost --png {png}")
    assert code == 0 and not err and png.read_bytes().startswith(b"\x89PNG")
    assert out.startswith("40 jobs; hours from arrival to end; rounds of 360 s\n") and out.endswith(f"{png}\n")
    rows = table(out.removesuffix(f"{png}\n"))
    blind, fair, cost = (rows[label] for label in ("fair, blind", "fair", "cost"))
    assert float(fair[0]) < 0.8 * float(blind[0])
    assert float(cost[-2]) < 0.9 * float(fair[-2]) and cost[-1] == "0"


def test_gpus_side_by_side(capsys) -> None:
    code, out, _ = run(capsys, f"{DAY} --gpus a100:8,l4:8,t4:8 --gpus a100:16,l4:8,t4:8")
    assert code == 0
    few, many = table(out).values()
    assert float(many[0]) < float(few[0])
    assert [row.split("  ")[0] for row in out.splitlines()[2:]] == ["fair; a100:8,l4:8,t4:8", "fair; a100:16,l4:8,t4:8"]


def test_jobs_that_are_drawn(capsys) -> None:
    line = f"{DAY} {GPUS} --draw 30 --per-hour 4 --seeds 2"
    code, out, _ = run(capsys, line)
    assert code == 0 and out.startswith("30 jobs, drawn 2 times;")
    assert run(capsys, line)[1] == out, "the same again"


def test_groups_and_budgets(capsys, tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    jobs = [{"rates": {"v": 2.0, "k": 1.0}, "work": 36000.0, "group": group} for group in "aabb"]
    path.write_text(json.dumps({"jobs": jobs, "groups": {"a": {"weight": 3}}}))
    code, out, _ = run(capsys, f"{path} --gpus v:1@4,k:1@1 --policy hierarchical --policy makespan --budget 45")
    assert code == 0
    assert float(table(out)["makespan"][-2]) < 47.0 < float(table(out)["hierarchical"][-2])


@pytest.mark.parametrize(
    "line, message",
    [
        ("nowhere.json --gpus v:1", "nowhere.json cannot be read as a workload"),
        (f"{DAY} --gpus v100", "'v100' is no kind of GPU; write KIND:COUNT or KIND:COUNT@PRICE"),
        (f"{DAY} --gpus a100:2,l4:4,t4:1", "can run nowhere here: it asks for a100 x4"),
        (f"{DAY} {GPUS} --policy best", "'best' is no policy"),
        (f"{DAY} {GPUS} --budget 3", "--budget 3 has no effect without --policy makespan"),
        (f"{DAY} {GPUS} --seeds 3", "--seeds 3 has no effect without --draw"),
        (f"{DAY} {GPUS} --draw 3", "--draw 3 needs --per-hour"),
        (f"{DAY} {GPUS} --draw 3 --per-hour 1 --seeds 0", "--seeds is 0"),
        (f"{DAY} {GPUS} --round 0", "--round is 0; it must be a finite number above 0, in seconds"),
        (f"{DAY} {GPUS} --round inf", "--round is inf; it must be a finite number above 0, in seconds"),
        (f"{DAY} {GPUS} --round 1e-9", "make rounds longer"),
        (f"{DAY} {GPUS} --policy makespan --budget nan", "the budget is nan; it must be a finite number"),
        (f"{DAY} {GPUS} --policy makespan --budget inf", "the budget is inf; it must be a finite number"),
        (f"{DAY} {GPUS} --overhead 2", "--overhead is 2; it is a part: above 0, below 1"),
        (f"{DAY} {GPUS} --png {DAY}/x.png", f"{DAY}/x.png cannot be written"),
    ],
)
def test_what_cannot_work(capsys, line: str, message: str) -> None:
    code, _, err = run(capsys, line)
    assert code == 1 and message in err


@pytest.mark.parametrize("suffix, begin", [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_the_suffix_says_the_format(capsys, tmp_path: Path, suffix: str, begin: bytes) -> None:
    jobs, picture = tmp_path / "jobs.json", tmp_path / f"out.{suffix}"
    jobs.write_text(json.dumps({"jobs": [{"rates": {"v": 1.0}, "work": 3600.0}]}))
    code, out, _ = run(capsys, f"{jobs} --gpus v:1 --picture {picture}")
    assert code == 0 and out.endswith(f"{picture}\n") and picture.read_bytes().startswith(begin)


def test_another_suffix_is_refused_before_the_simulation(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, f"{DAY} {GPUS} --picture {ROOT}")
    assert ended.value.code == 2 and "must end in .png, .svg or .pdf" in capsys.readouterr().err
