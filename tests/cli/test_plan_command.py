"""`fold3d plan`, as a user types it."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from fold3d import schedule as schedules
from fold3d.cli.main import main
from fold3d.plan.strategy import Strategy, parse
from tests.cli.test_trace_command import Plain, gpt2_folder  # noqa: F401  a fixture

PLAIN = "tests.cli.test_plan_command:plain"


def plain() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Plain(), {"x": torch.zeros(2, 4)}


def without_example() -> torch.nn.Module:
    return Plain()


BATCH = {"x": torch.zeros(2, 4)}


def with_a_batch_made_before() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Plain(), BATCH


def with_a_list() -> tuple[torch.nn.Module, list[int]]:
    return Plain(), [1, 2]


def with_two_batches() -> tuple[object, ...]:
    return Plain(), BATCH, BATCH


def with_text() -> tuple[torch.nn.Module, dict[str, str]]:
    return Plain(), {"x": "hello"}


def raises() -> torch.nn.Module:
    raise KeyError("size")


def without_samples() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return Plain(), {"x": torch.zeros(0, 4)}


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["plan", *map(str, arguments)])
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def strategy_in(out: str) -> Strategy:
    (line,) = [line for line in out.splitlines() if line.startswith("strategy: ")]
    return parse(line.removeprefix("strategy: "))


def test_a_transformers_model(capsys, gpt2_folder):  # noqa: F811
    code, out, err = run(capsys, gpt2_folder, "-w", 4, "-p", 2, "-m", 4, "--batch", 2, "--tokens", 16)
    assert code == 0 and not err
    assert out.startswith("GPT2LMHeadModel, ") and "input_ids (2, 16)" in out.splitlines()[0]
    found = strategy_in(out)
    assert (found.dp, found.pp, found.micro_batches) == (2, 2, 4) and found.ranges[-1][1] == 5
    assert f"the planner chose {found.name}\n" in out
    assert f"pin it with --segments {found.segments} --schedule {found.schedule} " in out
    assert [line.split()[:2] for line in out.splitlines()[-2:]] == [["stage", "0"], ["stage", "1"]]


def test_auto_is_the_planners_choice(capsys):
    plain = run(capsys, PLAIN, "-w", 2, "-m", 4)
    autos = [word for name in ("segments", "recompute", "schedule", "dp-sync") for word in (f"--{name}", "auto")]
    assert plain[0] == 0 and run(capsys, PLAIN, "-w", 2, "-m", 4, *autos) == plain


def test_a_schedule_of_a_file_says_how_many_segments(capsys, tmp_path):
    path = tmp_path / "mine.csv"
    schedules.save_csv(schedules.generate("interleaved", pp=2, segments=2, micro_batches=4), path)
    code, out, err = run(capsys, PLAIN, "-w", 2, "-p", 2, "-m", 4, "--schedule", path)
    assert code == 0 and not err and strategy_in(out).segments == 2


def test_splitting_backwards_gains_nothing_for_shards(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 4, "-t", 2, "-p", 2, "-m", 4, "--tokens", 16, "--segments", 1, "--tflops", 0.001)
    found = {name: step_ms(run(capsys, *common, "--schedule", name)[1]) for name in ("1f1b", "zb_h1")}
    assert found["zb_h1"] >= found["1f1b"]


def test_no_mesh_without_a_pipeline_is_planned_without_a_flush(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 2, "-p", "auto", "--global-micro-batches", 4, "--tokens", 16)
    code, out, err = run(capsys, *common, *LATE, "--no-flush")
    assert code == 0 and not err and strategy_in(out).pp == 2


def test_a_terminal_is_told_what_takes_a_while(capsys, monkeypatch, gpt2_folder):  # noqa: F811
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = run(capsys, gpt2_folder, "-w", 4, "-t", 2, "-m", 4, "--tokens", 16)
    assert code == 0
    assert err.splitlines()[:2] == [f"reading {gpt2_folder}", "dividing blocks among 2 ranks"]


def test_what_is_fixed_stays(capsys):
    code, out, _ = run(
        capsys, PLAIN, "-w", 4, "-p", 2, "-m", 4, "--schedule", "gpipe", "--segments", 1, "--dp-sync", "zero1",
        "--bucket_bytes", "1MiB", "--recompute", "True",
    )  # fmt: skip
    assert code == 0
    found = strategy_in(out)
    assert (found.schedule, found.segments, found.dp_sync, found.bucket_bytes) == ("gpipe", 1, "zero1", 1 << 20)
    assert dict(found.settings)["recompute"] == "full"
    assert "--schedule gpipe --dp_sync zero1 --bucket_bytes 1048576 --recompute full" in out


def step_ms(out: str) -> float:
    (line,) = [line for line in out.splitlines() if "(chosen)" in line]
    return float(line.split()[-2])


@pytest.mark.full
def test_a_faster_network_and_a_faster_device_make_the_step_shorter(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 2, "-m", 2, "--batch", 64)
    slow, network, device = (
        step_ms(run(capsys, *common, *more)[1])
        for more in (
            ("--bandwidth", 0.01, "--tflops", 0.001),
            ("--bandwidth", 10, "--tflops", 0.001),
            ("--bandwidth", 0.01, "--tflops", 1),
        )
    )
    assert network < slow and device < slow


@pytest.mark.full
def test_recomputing_costs_time_and_saves_memory(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 2, "-p", 2, "-m", 2, "--batch", 64, "--tflops", 0.01, "--memory-limit", "8GB")
    needs, times = [], []
    for recompute in ("none", "full"):
        _, out, _ = run(capsys, *common, "--recompute", recompute, "--segments", 1, "--schedule", "1f1b")
        (line,) = [line for line in out.splitlines() if "needs about" in line]
        needs.append(float(line.split()[2]))
        times.append(step_ms(out))
    assert needs[1] < needs[0] and times[1] > times[0]


def test_layers_can_be_measured_here(capsys):
    code, out, _ = run(capsys, PLAIN, "-w", 2, "-p", 2, "-m", 2, "--measure")
    assert code == 0 and "layers were not measured" not in out and strategy_in(out).pp == 2


def test_an_example_may_lie_elsewhere(capsys):
    """The model is made on the meta device; a batch that the function only passes on is not."""
    code, out, err = run(capsys, "tests.cli.test_plan_command:with_a_batch_made_before", "-w", 2)
    assert code == 0 and not err
    assert out == run(capsys, PLAIN, "-w", 2)[1]


@pytest.mark.full
def test_the_size_of_micro_batches_is_chosen_for_a_number_of_samples(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 2, "-p", 2, "--tokens", 16, "--tflops", 0.001)
    code, out, _ = run(capsys, *common, "--global-samples", 8)
    assert code == 0
    table = out.splitlines()[out.splitlines().index("samples of a micro-batch  predicted step") + 1 :][:4]
    tried = {int(line.split()[0]): float(line.split()[1]) for line in table}
    assert set(tried) == {1, 2, 4, 8} and list(tried.values()) == sorted(tried.values())
    best = next(iter(tried))
    assert strategy_in(out).micro_batches * best == 8 and step_ms(out) == min(tried.values())
    for size, milliseconds in tried.items():
        alone = run(capsys, *common, "--batch", size, "-m", 8 // size)[1]
        assert step_ms(alone) == milliseconds


LATE = ("--gradient-delay", 1)
ON_HOST = ("--offload-optimizer", "true")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PLAIN, "-w", 3, "--global-samples", 4), "--global-samples=4 cannot be divided by 3 replicas"),
        ((PLAIN, "-w", 2, "--global-samples", 4, "-m", 2), "--micro-batches is chosen where --global-samples is given"),
        ((PLAIN, "-w", 3, "-p", 2), "--world-size=3 is no multiple of --tp * --pp = 2; change one of them"),
        ((PLAIN, "-w", 2, "--tflops", 0), "--tflops is 0; it must be positive"),
        ((PLAIN, "-w", 2, "--tflops", "1e-300"), "--tflops is 1e-300; it must be between 1e-09 and 1e+09"),
        ((PLAIN, "-w", 2, "--bandwidth", "inf"), "--bandwidth is inf; it must be between 1e-09 and 1e+09"),
        ((PLAIN, "-w", 4, "--device", "A100-80GB:8"), "A100-80GB:8 has 8 GPUs, and there are 4 processes"),
        ((PLAIN, "-w", 2, *LATE, "--no-flush"), "--no-flush has no effect with --pp 1"),
        ((PLAIN, "-w", 2, "-p", 2, *LATE, "--no-flush", *ON_HOST), "--no-flush is not available with --offload-opt"),
        ((PLAIN, "-w", 2, *LATE, "--delay-correction", "predict", *ON_HOST), "predict is not available with --offload"),
        (("tests.cli.test_plan_command:raises", "-w", 2), "raised KeyError: 'size' ("),
        ((PLAIN, "-w", 2, "--segments", "two"), "segments='two': invalid literal"),
        ((PLAIN, "-w", 2, "--segments", 9), "lower segments or pp"),
        ((PLAIN, "-w", 2, "--dp_sync", "lazy"), "dp_sync='lazy': must be one of zero1, early, serial"),
        ((PLAIN, "-w", 2, "--bucket-bytes", "many"), "bucket_bytes='many': must be a number of bytes"),
        (
            (PLAIN, "-w", 2, "--recompute", "blocks:0"),
            "recompute='blocks:0': 'blocks:0' must say every how many blocks",
        ),
        (
            (PLAIN, "-w", 2, "--recompute", "nowhere"),
            "'nowhere' names no module inside of a block",
        ),
        ((PLAIN, "-w", 2, "--offload", "boundaries"), 'offload="boundaries" has no effect with recompute="none"'),
        ((PLAIN, "-w", 2, "--schedule", "fastest"), "fastest"),
        ((PLAIN, "-w", 2, "--memory-limit", "1000"), "nothing fits: stage 0 needs at least"),
        ((PLAIN, "-w", 2, "--tokens", 8), "--tokens=8 takes a positive number and a model whose input is input_ids"),
        (("tests.cli.test_plan_command:without_example", "-w", 2), "returns no example batch"),
        (("tests.cli.test_plan_command:with_a_list", "-w", 2), "returned a module and list; return (model, batch)"),
        (("tests.cli.test_plan_command:with_two_batches", "-w", 2), "returned a module and dict, dict; return"),
        (("tests.cli.test_plan_command:with_text", "-w", 2), "batch['x'] is 'hello'; it must be a tensor"),
        (("tests.cli.test_plan_command:without_samples", "-w", 2), "batch['x'] is a tensor of shape (0, 4)"),
        ((":plain", "-w", 2), "':plain': Empty module name"),
        ((PLAIN, "-w", 2, "--latency", "inf"), "--latency is inf; it must not be negative, and below"),
        ((PLAIN, "-w", 1 << 40), "--world-size is 1099511627776; it must be below"),
        ((PLAIN, "-w", 2, "-p", 2, "--group-size", 1 << 40), "group_size=1099511627776 is more than"),
    ],
)
def test_errors(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 1 and message in err


@pytest.mark.full
def test_sums_of_shards_take_time_that_halves_hide(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 2, "-t", 2, "-m", 2, "--batch", 8, "--tflops", 0.005)
    fast, halves, slow = (
        step_ms(run(capsys, *common, *more)[1])
        for more in (
            ("--tp-bandwidth", 1e6, "--tp-latency", 1e-3),
            ("--tp-bandwidth", 1),
            ("--tp-bandwidth", 1, "--tp-overlap", "none"),
        )
    )
    assert fast < halves < slow
    for option, value, message in (
        ("--tp-overlap", "half", "tp_overlap='half': must be one of auto, sub, fused, none"),
        ("--tp-bandwidth", 0, "--tp-bandwidth is 0; it must be positive"),
    ):
        code, _, err = run(capsys, *common, option, value)
        assert code == 1 and message in err
    code, _, err = run(capsys, gpt2_folder, "-w", 2, "--tp-latency", 5)
    assert code == 1 and "--tp-latency=5.0 has no effect without --tp" in err


@pytest.mark.full
def test_shards_take_less_each(capsys, gpt2_folder):  # noqa: F811
    """Twice the ranks with half of each weight: less memory and time on each, and fewer replicas."""
    common = (gpt2_folder, "-w", 8, "-p", 2, "-m", 4, "--tokens", 16, "--memory-limit", "1GB")
    found = {tp: run(capsys, *common, "-t", tp) for tp in (1, 2)}
    assert [code for code, _, _ in found.values()] == [0, 0], found
    whole, shared = (strategy_in(out) for _, out, _ in found.values())
    assert (whole.dp, whole.tp, shared.dp, shared.tp) == (4, 1, 2, 2)
    sizes = [out.split("needs about ")[1].split(" of ")[0].split() for _, out, _ in found.values()]
    needs = [float(number) * {"kB": 1e3, "MB": 1e6}[unit] for number, unit in sizes]
    assert needs[1] < 0.8 * needs[0]
    code, _, err = run(capsys, *common, "-t", 3)
    assert code != 0 and "tp*pp = 3*2 = 6" in err


@pytest.mark.full
def test_the_mesh_is_searched_with_the_rest(capsys, gpt2_folder):  # noqa: F811
    """Two heads: four shards are refused by the splitting, with its reason in the table."""
    common = (gpt2_folder, "-w", 4, "--tokens", 16, "-t", "auto", "-p", "auto")
    code, out, err = run(capsys, *common, "--global-micro-batches", 8, "--ranks-per-host", 4, "--batch", 2)
    assert code == 0, err
    found = strategy_in(out)
    assert found.dp * found.tp * found.pp == 4 and found.dp * found.micro_batches == 8
    rows = [line for line in out.splitlines() if line.startswith("dp=")]
    assert {tuple(row.split(",")[0].split()) for row in rows} == {
        (f"dp={4 // tp // pp}", f"tp={tp}", f"pp={pp}") for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4
    }
    assert rows[0].startswith(f"dp={found.dp} tp={found.tp} pp={found.pp}, {found.micro_batches} micro-batches each")
    (refused,) = [row for row in rows if "tp=4" in row]
    assert " ms " not in refused and "4" in refused.split("each")[1]
    for arguments, message in (
        ((), "give --global-micro-batches, a positive number"),
        (("--global-micro-batches", 8, "-m", 2), "give --global-micro-batches, a positive number"),
        (("--global-micro-batches", 3, "-t", 1, "-p", 1), "--global-micro-batches=3 is for --tp auto or --pp auto"),
        (("--global-micro-batches", 8, "--ranks-per-host", 0), "--ranks-per-host is 0"),
    ):
        code, _, err = run(capsys, *common, *arguments)
        assert code == 1 and message in err


def test_it_says_from_where_on_it_is_ahead_of_data_parallelism(capsys):
    """On a slow network the plan is ahead, on a fast one DDP; on one host there is nothing to plan for."""
    common = (PLAIN, "-w", 4, "-p", 2, "-m", 4, "--ranks-per-host", 2, "--latency", 0.01, "--tflops", 1e-6)
    found = {}
    for gbit in (1e-6, 10):
        code, out, _ = run(capsys, *common, "--bandwidth", gbit)
        assert code == 0
        found[gbit] = {line.split()[0]: line for line in out.splitlines() if " takes at least " in line}
        assert set(found[gbit]) == {"DDP", "HSDP"}
    assert "take DDP if the model fits" in found[10]["DDP"] and "take HSDP if" in found[10]["HSDP"]
    assert "take DDP" not in found[1e-6]["DDP"] and "takes 0." in found[1e-6]["DDP"]
    _, out, _ = run(capsys, PLAIN, "-w", 4, "-p", 2, "-m", 4, "--ranks-per-host", 4)
    assert "all 4 processes are on one host" in out and "take FSDP" in out


@pytest.mark.parametrize(
    "planner, words",
    [
        ("pipedream", ["PipeDream (all-reduce as ring): ", "PipeDream (all-reduce as text): ", "ms without a flush"]),
        ("2bw", ["PipeDream-2BW: ", " pipelines of ", "samples a second without a flush"]),
        ("ptd-p", ["PTD-P: t=1 p=1 d=4, 1 samples a micro-batch"]),
    ],
)
def test_what_another_planner_would_choose(capsys, gpt2_folder, planner, words):  # noqa: F811
    common = (gpt2_folder, "-w", 4, "-p", 2, "-m", 4, "--tokens", 16, "--ranks-per-host", 2)
    plain = run(capsys, *common)
    code, out, _ = run(capsys, *common, "--planner", planner)
    assert code == 0 and all(word in out for word in words)
    added = [line for line in out.splitlines() if line not in plain[1].splitlines()]
    assert [line.split(":")[0] for line in added] == [word.split(":")[0] for word in words if ":" in word]


def test_what_another_planner_cannot_know(capsys):
    code, _, err = run(capsys, PLAIN, "-w", 2, "-m", 2, "--planner", "ptd-p")
    assert code == 1 and "--planner ptd-p knows models whose configuration has num_hidden_layers" in err
    code, _, err = run(capsys, PLAIN, "-w", 3, "-m", 2, "--planner", "2bw", "--ranks-per-host", 2)
    assert code == 1 and "3 processes are no multiple of --ranks-per-host 2" in err


def test_a_schedule_that_runs_back(capsys, gpt2_folder):  # noqa: F811
    code, out, _ = run(capsys, gpt2_folder, "-w", 4, "-p", 2, "-m", 4, "--tokens", 16, "--schedule", "zb_v")
    strategy = strategy_in(out)
    assert code == 0 and (strategy.schedule, strategy.segments) == ("zb_v", 2)


def test_a_cluster_of_hosts(capsys, gpt2_folder, tmp_path):  # noqa: F811
    """Options and a file say the same; what goes between hosts shares a card, what stays inside does not."""
    common = (gpt2_folder, "-p", 2, "-m", 4, "--tokens", 16, "--tflops", 0.01)
    hosts = ("--hosts", 2, "--gpus-per-host", 2, "--link", "0.01Gbit,50us", "--within", "100Gbit,5us")
    code, out, err = run(capsys, *common, *hosts)
    assert code == 0, err
    assert "4 processes, 0.01 TFLOP/s each; 2 a host, between hosts 0.01 Gbit/s, 50 us, within 100 Gbit/s, 5 us" in out
    for name, text in (
        ("cluster.toml", 'hosts = 2\ngpus_per_host = 2\nlink = "0.01Gbit, 50us"\nwithin = "100Gbit,5us"\n'),
        ("cluster.json", '{"hosts": 2, "gpus_per_host": 2, "link": "10Mbit,0.05ms", "within": "100Gbit,5us"}'),
    ):
        (tmp_path / name).write_text(text)
        assert run(capsys, *common, "--cluster", tmp_path / name)[1] == out
    assert run(capsys, *common, "-w", 4, "--hosts", 2, *hosts[4:])[1] == out
    alone = run(capsys, *common, "-w", 4, "--bandwidth", 0.01)[1]  # a card for each: two gradients do not share one
    assert step_ms(alone) < step_ms(out)
    (tmp_path / "wrong.toml").write_text("gpus = 2\n")
    for arguments, message in (
        ((), "say how many processes there are"),
        (("-w", 5, "--hosts", 2), "--hosts 2 needs a positive --gpus-per-host, or -w, a multiple of it"),
        (("-w", 8, *hosts), "-w 8 contradicts --hosts * --gpus-per-host = 4"),
        ((*hosts, "--bandwidth", 3), "--bandwidth contradicts --link"),
        (("-w", 4, "--link", "10Gbit,5us"), "say how many GPUs each has"),
        (("-w", 4, "--gpus-per-host", 2, "--link", "fast"), "--link is 'fast'; it must be a bandwidth and a latency"),
        (("-w", 4, "--gpus-per-host", 2, "--link", "1.2.3Gbit,5us"), "it must be a bandwidth and a latency"),
        (("-w", 4, "--gpus-per-host", 2, "--link", "25Gbit,.us"), "it must be a bandwidth and a latency"),
        (("-w", 4, "--gpus-per-host", 2, "--link", "1e999Gbit,5us"), "it must be a bandwidth and a latency"),
        (("-w", 4, "--device", "Abacus"), "--device is 'Abacus'; known are B200"),
        (("-w", 4, "--memory", "80GB", "--memory-limit", "8GB"), "--memory-limit contradicts --memory"),
        (("-w", 4, "--host-memory", "8GB"), "--host-memory is of a host: say how many GPUs it has"),
        (("-w", 4, "--gpus-per-host", 2, "--host-memory", "much"), "--host-memory='much': must be a positive"),
        (("--cluster", tmp_path / "wrong.toml"), "'gpus' is none of hosts"),
        (("--cluster", tmp_path / "none.toml"), "No such file"),
    ):
        code, _, err = run(capsys, *common, *arguments)
        assert code == 1 and message in err


def test_what_leaves_the_gpus_fits_into_host_memory(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 2, "-m", 8, "--batch", 4, "--gpus-per-host", 2, "--tflops", 0.001, "--json")
    most = json.loads(run(capsys, *common)[1])["memory_bytes"]
    common = (*common, "--memory-limit", most * 3 // 4, "--copy-bandwidth", 1000)
    free = json.loads(run(capsys, *common)[1])
    assert free["pool_limit"] is None and free["pool_bytes"] > 0
    found = json.loads(run(capsys, *common, "--host-memory", free["pool_bytes"])[1])  # half of it for each
    assert found["pool_limit"] == int(0.9 * free["pool_bytes"]) // 2
    assert found["pool_bytes"] <= found["pool_limit"] and found["memory_bytes"] <= found["memory_limit"]
    assert found["step_seconds"] > free["step_seconds"]
    known = json.loads(run(capsys, *common, "--device", "A100")[1])
    assert known["pool_limit"] == int(0.9 * (144 << 30))


def test_what_a_step_comes_to(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 2, "-m", 4, "--batch", 2, "--tokens", 16, "--price", 3.6)
    code, text, _ = run(capsys, *common, "--device", "A100-80GB", "--dtype", "bfloat16")
    assert code == 0 and "fits: " in text and "of 72 GB" in text and "MFU " in text and "of 312 TFLOP/s" in text
    found = json.loads(run(capsys, *common, "--device", "A100-80GB", "--dtype", "bfloat16", "--json")[1])
    assert parse(found["strategy"]) == strategy_in(text)
    assert found["flags"].startswith(
        "--dp 2 --tp 1 --pp 1 --gradient_accumulation_steps 4 --per_device_train_batch_size 2"
    )
    assert found["step_seconds"] == pytest.approx(step_ms(text) / 1e3, abs=1e-4) and found["memory_limit"] == 72 * 10**9
    tokens = 2 * 4 * 2 * 16 / found["step_seconds"]
    assert found["tokens_per_second"] == pytest.approx(tokens)
    assert found["cost_of_1e9_tokens"] == pytest.approx(2 * 3.6 / 3600 * 1e9 / tokens)
    assert f"{found['cost_of_1e9_tokens']:,.2f} for 10^9 tokens" in text
    single = json.loads(run(capsys, *common, "--device", "A100-80GB", "--dtype", "float32", "--json")[1])
    assert single["step_seconds"] > found["step_seconds"] and single["memory_bytes"] > found["memory_bytes"]


def test_tokens_and_dtype_are_the_configurations(capsys, gpt2_folder, tmp_path):  # noqa: F811
    config = json.loads((gpt2_folder / "config.json").read_text())
    shown = run(capsys, gpt2_folder, "-w", 1)[1].splitlines()[0]
    assert f"input_ids (1, {config['n_positions']})" in shown
    whole = json.loads(run(capsys, gpt2_folder, "-w", 1, "--json")[1])["memory_bytes"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert json.loads(run(capsys, tmp_path, "-w", 1, "--json")[1])["memory_bytes"] < whole


@pytest.mark.full
def test_meshes_as_numbers(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-w", 4, "--tokens", 16, "-t", "auto", "-p", "auto", "--global-micro-batches", 8)
    found = json.loads(run(capsys, *common, "--json")[1])
    assert {one["dp"] * one["tp"] * one["pp"] for one in found["meshes"]} == {4}
    assert {one["micro_batches"] * one["dp"] for one in found["meshes"]} == {8}
    assert found["meshes"][0]["step_seconds"] == found["step_seconds"]
    refused = [one for one in found["meshes"] if one["tp"] == 4]
    assert refused and all(one["step_seconds"] is None and one["reason"] for one in refused)


def test_a_strategy_is_given_back(capsys, gpt2_folder, tmp_path):  # noqa: F811
    common = (gpt2_folder, "-w", 4, "-p", 2, "-m", 4, "--tokens", 16)
    code, out, _ = run(capsys, *common, "--segments", 2, "--dp-sync", "zero1")
    path = tmp_path / "plan.txt"
    path.write_text(out)
    again, found, err = run(capsys, gpt2_folder, "--tokens", 16, "--strategy", path)
    assert code == again == 0 and not err
    assert strategy_in(found) == strategy_in(out) and step_ms(found) == step_ms(out)
    for more, why in (
        (("-w", 8), "--world-size is 8"),
        (("--segments", 3), "--segments has no effect with --strategy"),
    ):
        code, _, err = run(capsys, gpt2_folder, "--tokens", 16, "--strategy", path, *more)
        assert code != 0 and why in err


def test_several_devices_and_several_kinds_in_one_job(capsys, gpt2_folder):  # noqa: F811
    common = (gpt2_folder, "-p", 2, "-m", 4, "--tokens", 16, "--segments", 1)
    code, out, _ = run(capsys, *common, "-w", 2, "--device", "A100", "--device", "T4", "--json")
    assert code == 0
    fast, slow = json.loads(out)
    assert (fast["device"], slow["device"]) == ("A100", "T4") and fast["step_seconds"] <= slow["step_seconds"]
    code, out, _ = run(capsys, *common, "-w", 2, "--device", "A100", "--device", "T4")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[-3:]] == ["device", "A100", "T4"]
    code, out, _ = run(capsys, *common, "--device", "A100:1,T4:1", "--dtype", "bfloat16")
    assert code == 0 and "the slowest 4.8 times slower" in out and strategy_in(out).pp == 2
    code, _, err = run(capsys, *common, "-w", 3, "--device", "A100:1,T4:1")
    assert code != 0 and "has 2 GPUs, and there are 3 processes" in err
