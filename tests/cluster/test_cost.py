"""Prices, and what a training costs: the arithmetic of the dissertation's chapter 6."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fold3d.cluster import launch
from fold3d.cluster.cost import GREEDY, UNIFORM, MachinePlan, Offer, Terms, offers
from fold3d.cluster.devices import Machine, choose_machines, read_prices
from fold3d.cluster.rates import Measured, Measurement
from fold3d.errors import ConfigError

AWS = """# Of AWS in 2020, an hour; the K80 at the spot price that section 6.3 has for it.
device,gpus,price,spot,tflops,memory_gb,within_gbit
v100,1,3.06,0.918,,,
k80,1,0.90,0.27,4,12,100
"""
GCP = """device,gpus,price,tflops,memory_gb,within_gbit
v100,1,2.48,125,16,100
p100,1,1.46,20,16,100
k80,1,0.45,4,12,100
"""
FOREVER = Terms(tokens=1e9, deadline=math.inf, restart=1.0 / 3600.0, up=1e9, down=1e-9, draws=2)


def machines(tmp_path: Path, text: str) -> dict[str, Machine]:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    return {one.device: one for one in read_prices(path)}


def test_four_days_of_a_v100(tmp_path: Path) -> None:
    """A3C, which is 2.15015 times as fast on a V100: 96 h of it cost 88.13 as a spot machine, and on a K80 55.73."""
    there = machines(tmp_path, AWS)
    plans = [MachinePlan(machine=there["v100"], rate=2.15015), MachinePlan(machine=there["k80"], rate=1.0)]
    terms = Terms(tokens=96 * 3600 * 2.15015, deadline=math.inf, restart=1.0 / 3600.0, up=1e9, down=1e-9, draws=2)
    cheap, dear = offers(plans, Measured(), terms)
    assert (cheap.plan.machine.device, dear.plan.machine.device) == ("k80", "v100")
    assert dear.mixed[GREEDY].dollars == pytest.approx(88.13, abs=0.005)  # 96 x 0.918
    assert cheap.mixed[GREEDY].dollars == pytest.approx(55.73, abs=0.005)  # 96 x 2.15015 x 0.27
    assert dear.dollars == pytest.approx(96 * 3.06, abs=0.005)
    assert dear.dollars / dear.mixed[GREEDY].dollars == pytest.approx(3.33, abs=0.01), "table 6.3"


@pytest.mark.parametrize(
    "model, p100, v100, dollar_p100, dollar_v100",
    [
        ("A3C", 1.2, 2.2, 0.4, 0.4),
        ("CycleGAN", 4.5, 9.3, 1.4, 1.7),
        ("ResNet-18", 4.0, 6.8, 1.2, 1.2),
        ("ResNet-50", 3.7, 9.6, 1.1, 1.7),  # the table has 1.8: of rates that were not rounded
    ],
)
def test_table_6_1(
    tmp_path: Path, model: str, p100: float, v100: float, dollar_p100: float, dollar_v100: float
) -> None:
    """Throughput per dollar against a K80, at GCP's prices."""
    there = machines(tmp_path, GCP)
    rates = {"k80": 1.0, "p100": p100, "v100": v100}
    found = offers([MachinePlan(machine=there[kind], rate=rate) for kind, rate in rates.items()], Measured(), FOREVER)
    cost = {one.plan.machine.device: one.dollars_per_1e9 for one in found}
    assert round(cost["k80"] / cost["p100"], 1) == dollar_p100
    assert round(cost["k80"] / cost["v100"], 1) == dollar_v100
    assert found[0].plan.machine.device == max(rates, key=lambda kind: 1 / cost[kind])


PRICES = """device,gpus,price,spot,network_gbit,accelerator,cloud
a100-80,8,20.0,8.0,400,A100-80GB,gcp
a100-80,8,22.0,,400,A100-80GB,aws
l4,4,3.0,,50,L4,gcp
"""


def made(tmp_path: Path, *, deadline: float = math.inf, measured: Measured | None = None) -> list[Offer]:
    """Returns the offers for a100-80 x8, x16 and l4 x8; 10 h of work on the first."""
    path = tmp_path / "prices.csv"
    path.write_text(PRICES)
    chosen = choose_machines("a100-80:8,a100-80:16,l4:8", read_prices(path))
    assert [(one.cloud, one.count) for one in chosen] == [("gcp", 1), ("gcp", 2), ("gcp", 2)]
    plans = [
        MachinePlan(machine=machine, rate=rate, layout="dp=2 tp=4 pp=1", flags="--dp 2 --tp 4")
        for machine, rate in zip(chosen, (1e5, 1.8e5, 1e4), strict=True)
    ]
    terms = Terms(tokens=3.6e9, deadline=deadline, restart=0.1, up=8.0, down=2.0, draws=20)
    return offers(plans, measured or Measured(), terms)


def test_the_cheapest_that_meets_the_deadline(tmp_path: Path) -> None:
    assert [one.plan.machine.name for one in made(tmp_path)] == [
        "a100-80 x8 gcp",
        "a100-80 x16 gcp, 2 machines",
        "l4 x8 gcp, 2 machines",
    ]
    # 10.1 h and, a prediction's error later, 15.7 h; twice the GPUs 5.7 and 8.7 h.
    first, second, third = made(tmp_path, deadline=12.0)
    assert (first.plan.machine.all_gpus, first.meets, second.meets, third.meets) == (16, True, False, False)
    assert first.hours == pytest.approx(3.6e9 / 1.8e5 / 3600 + 0.1)
    assert first.dollars == pytest.approx(40.0 * first.hours)
    assert first.dollars_per_1e9 == pytest.approx(40.0 * 1e9 / 1.8e5 / 3600)
    assert not third.mixed and set(first.mixed) == {GREEDY, UNIFORM}
    assert first.best[0] in first.mixed and first.best[1] < first.dollars
    # Measured on 8, where it is as fast as predicted: 10.1 h +- 3 % are sure to be in time.
    found = made(tmp_path, deadline=12.0, measured=Measured(rates=(Measurement("a100-80", 8, 1e5),)))
    (sure,) = (one for one in found if one.plan.machine.name == "a100-80 x8 gcp")
    assert sure.known.measured and sure.meets and not second.meets
    assert sure.hours_at_worst == pytest.approx(10.0 * math.exp(0.03) + 0.1)


def test_scripts(tmp_path: Path) -> None:
    """What sbatch, SkyPilot and its optimizer are given; that Slurm takes it, tests/cluster/slurm shows."""
    found = made(tmp_path)
    text = launch.sbatch(found[0], ["train.py", "--data", "a b"], "out")
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash" and "#SBATCH --gres=gpu:a100-80:8" in lines and "#SBATCH --nodes=1" in lines
    assert f"#SBATCH --time={math.ceil(60 * found[0].hours_at_worst)}" in lines
    assert "train.py --data" in text and "a b" in text and "--dp 2 --tp 4 --output_dir out" in text
    task = yaml.safe_load(launch.skypilot(found, ["train.py"], "/mnt/out"))
    assert task["num_nodes"] == 1 and task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert task["resources"]["ordered"] == [
        {"accelerators": "A100-80GB:8", "use_spot": True, "infra": "gcp"},
        {"accelerators": "A100-80GB:8", "use_spot": False, "infra": "gcp"},
    ]
    assert "*A100*80*) FLAGS='--dp 2 --tp 4' ;;" in task["run"] and "/mnt/out/preempted.json" in task["run"]
    namespace: dict = {}
    exec(launch.estimator(found[1:], "gpt2", 3.6e9), namespace)

    resources = SimpleNamespace(accelerators={"L4": 4})
    assert namespace["estimate"](resources) == pytest.approx(3600 * found[2].hours, abs=1)


def test_a_file_of_a_spreadsheet_and_names_with_numbers(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("\ufeffdevice,gpus,price\nh100-8,8,20\nh100-94,8,30\n", encoding="utf-8")
    assert [one.memory_gb for one in read_prices(path)] == [80.0, 94.0]


@pytest.mark.parametrize(
    "text, message",
    [
        ("device,gpus\na,1\n", "is not: a line device,gpus,price"),
        ("device,gpus,price,colour\na,1,1,red\n", "has a column 'colour'"),
        ("device,gpus,price\n", "is not: a line device,gpus,price"),
        ("device,gpus,price\nh100,8,free\n", r"machine 1: price is 'free'; it must be a finite number above 0"),
        ("device,gpus,price\nh100,0.5,3\n", "machine 1: gpus is 0.5; it must be a whole number, 1 or more"),
        ("device,gpus,price\nh100,8,\n", "machine 1 has no price; fill in that column"),
        ("device,gpus,price\nmine,8,3\n", "machine 1 has no tflops; fill in that column; 'mine' is not among those kn"),
        ("device,gpus,price\nl4,8,29,40\n", "machine 1 has 4 values, and there are 3 columns; numbers .* with a point"),
        ("device,gpus,price,price\nl4,8,8,80\n", "has two columns 'price'"),
        ("device,gpus,price\nh 1,8,3\n", "machine 1: device is 'h 1'; it must be a name such as a100-80"),
    ],
)
def test_prices_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prices(path)
    with pytest.raises(ConfigError, match="cannot be read as prices"):
        read_prices(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    "devices, message",
    [
        ("a100-80", "'a100-80' names no GPUs; write KIND:COUNT, such as a100-80:8"),
        ("h100:8", "no machine in --prices has h100; there are a100-80, l4"),
        ("l4:6", "machines with l4 have 4 GPUs; take a multiple of it"),
        ("l4:4,l4:4", "each kind and number of GPUs may be named once"),
    ],
)
def test_devices_that_cannot_be_had(tmp_path: Path, devices: str, message: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(PRICES)
    with pytest.raises(ConfigError, match=message):
        choose_machines(devices, read_prices(path))
    path.write_text("device,gpus,price\nl4,4,1\n")
    with pytest.raises(ConfigError, match="l4:8 are 2 machines; --prices must say network_gbit of them"):
        choose_machines("l4:8", read_prices(path))
