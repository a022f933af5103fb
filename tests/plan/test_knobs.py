"""The registry of knobs: a new one is a file and a line, and everything that walks the registry has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fold3d.cli.main import main
from fold3d.config import ParallelConfig
from fold3d.errors import ConfigError
from fold3d.plan.job import TrainingJob
from fold3d.plan.resolve import constraints_of, unplanned
from fold3d.plan.search import recheck, search
from fold3d.plan.space import registry
from fold3d.plan.space.knob import Knob
from fold3d.plan.strategy import Constraints, parse
from tests.plan.jobs import make_job


def _parse(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise ValueError("must be positive")
    return value


def _check(value: float, constraints: Constraints) -> None:
    if value > 4 and constraints.segments == 1:
        raise ConfigError(f"compression={value} needs several segments")


def _costs(job: TrainingJob, value: float) -> TrainingJob:
    """Gradients travel compressed, and compressing costs time."""
    profile, network = job.profile, job.network
    backward = tuple(seconds * (1 + 0.05 * (value - 1)) for seconds in profile.backward)
    return replace(
        job,
        profile=replace(profile, backward=backward),
        network=replace(network, dp_bandwidth=network.dp_bandwidth * value),
    )


COMPRESSION = Knob(
    name="compression",
    help="by which factor gradients are made smaller",
    parse=_parse,
    candidates=lambda job: (1.0, 2.0, 8.0) if job.dp > 1 else (1.0,),
    default=1.0,
    check=_check,
    costs=_costs,
    flag=lambda value, strategy: None if value == 1.0 else str(value),
)


@pytest.fixture
def _compression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KNOBS", [*registry.KNOBS, COMPRESSION])


SMALL = {"layers": 8, "micro_batches": 4}


@pytest.mark.usefixtures("_compression")
def test_the_search_tries_its_values_and_everything_tells_it() -> None:
    plain = search(make_job(**SMALL), Constraints(settings=(("compression", "1.0"),)))
    slow = search(make_job(**SMALL))
    assert COMPRESSION.of(slow.strategy) > 1.0 and slow.step_ms < plain.step_ms
    assert COMPRESSION.of(plain.strategy) == 1.0 and "--compression" not in plain.flags
    assert f"--compression {COMPRESSION.of(slow.strategy)}" in slow.table
    assert f"compression={COMPRESSION.of(slow.strategy)}" in str(slow.strategy)
    assert parse(str(slow.strategy)) == slow.strategy
    assert str(slow.strategy) != str(replace(slow.strategy, settings=plain.strategy.settings))
    fast = search(make_job(bandwidth=1e12, **SMALL))
    assert COMPRESSION.of(fast.strategy) == 1.0, "where nothing has to be hidden it only costs"
    assert COMPRESSION.of(search(make_job(dp=1, **SMALL)).strategy) == 1.0


@pytest.mark.usefixtures("_compression")
def test_where_nothing_is_planned_it_has_its_default_or_what_the_user_says() -> None:
    ranges = ((0, 4), (4, 8))
    config = ParallelConfig(pp=2, micro_batches=4)
    free = unplanned(config, Constraints(segments=1), 1, ranges)
    assert COMPRESSION.of(free) == 1.0 and parse(str(free)) == free
    fixed = unplanned(config, Constraints(segments=1, settings=(("compression", "2.0"),)), 1, ranges)
    assert COMPRESSION.of(fixed) == 2.0


@pytest.mark.usefixtures("_compression")
def test_what_is_fixed_stays_and_what_cannot_be_is_refused() -> None:
    fixed = registry.constrained(compression=2.0, segments=2)
    assert COMPRESSION.of(search(make_job(**SMALL), fixed).strategy) == 2.0
    with pytest.raises(ConfigError, match=r"compression=8\.0 needs several segments"):
        registry.constrained(compression=8.0, segments=1)
    with pytest.raises(ConfigError, match="compression='-1': must be positive"):
        search(make_job(**SMALL), Constraints(settings=(("compression", "-1"),)))


@pytest.mark.usefixtures("_compression")
def test_looking_again_keeps_it() -> None:
    job = make_job(**SMALL)
    slow = search(
        job, registry.constrained(compression=2.0, dp_sync="early", schedule="fold", group_size=1, segments=4)
    )
    times = [10.0] * slow.strategy.num_chunks
    better = recheck(job, slow.strategy, times, times)
    assert better is not None and COMPRESSION.of(better.strategy) == 2.0
    measured = 4 * SMALL["micro_batches"] * (10.0 + 10.0)
    update = 1e3 * job.profile.update_seconds * sum(job.profile.gradient_bytes.values()) / job.pp
    found = better.prediction.ranks[0].compute_ms
    assert found == pytest.approx(measured + update), "what was measured has the cost of compressing inside"


@pytest.mark.usefixtures("_compression")
def test_the_command_line_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "by which factor gradients are made smaller" in " ".join(capsys.readouterr().out.split())
    model = "tests.cli.test_plan_command:plain"
    assert main(["plan", model, "-w", "4", "-p", "2", "-m", "2", "--compression", "2"]) == 0
    out = capsys.readouterr().out
    assert "--compression 2.0" in out and "compression=2.0" in out


def test_what_nobody_registered_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'compression' is nothing that can be chosen: there are segments, schedule"):
        search(make_job(**SMALL), Constraints(settings=(("compression", "2.0"),)))


def test_each_knob_s_text_says_its_value() -> None:
    job = make_job(**SMALL)
    for knob in registry.KNOBS:
        for value in knob.candidates(job):
            assert knob.read(knob.text(value)) == value


def test_the_user_s_settings_are_found_by_name() -> None:
    config = ParallelConfig(pp=2, segments=2, dp_sync="zero1", bucket_bytes="1MiB", recompute=True)
    assert constraints_of(config) == registry.constrained(
        segments=2,
        dp_sync="zero1",
        bucket_bytes=1 << 20,
        recompute=True,
        offload_optimizer=False,
        dp_sync_dtype="float32",
        gradient_delay=0,
    )
    assert constraints_of(ParallelConfig(pp=2)) == registry.constrained(
        offload_optimizer=False, dp_sync_dtype="float32", gradient_delay=0
    )
    assert constraints_of(ParallelConfig(recompute=False)) == registry.constrained(
        recompute="none", offload_optimizer=False, dp_sync_dtype="float32", gradient_delay=0
    )
