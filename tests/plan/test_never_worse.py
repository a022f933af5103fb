"""The search against the simulator's own word: never worse than what is pinned, nor than what trying everything finds.

Both are statements about one simulator and one memory model: whether these are right is measured elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fold3d import schedule as schedules
from fold3d.errors import ConfigError
from fold3d.plan.costs import LayerBytes
from fold3d.plan.job import TrainingJob
from fold3d.plan.layout import Plan, cut, simulate
from fold3d.plan.memory import Spared
from fold3d.plan.search import decide_jobs, search
from fold3d.plan.strategy import Constraints
from fold3d.recompute import Recompute
from tests.plan.jobs import make_job

EQUAL = 1.003
"""What the search takes for equal."""
SPLIT = "zb_h1"
"""The schedule with split backwards that needs no style of its own."""


def random_job(numbers: random.Random) -> TrainingJob:
    """A job of any shape: what is slow, and what is short, is chosen anew each time."""
    pp = numbers.choice((1, 2, 3, 4, 8))
    layers = numbers.choice((2, 3, 4, 6, 8))
    micro_batches = numbers.choice((1, 2, 4, 6, 8, 12, 16, 24))
    job = make_job(
        dp=numbers.choice((1, 2, 4)),
        pp=pp,
        layers=layers,
        micro_batches=micro_batches,
        forward=0.3 * 10 ** numbers.uniform(-1, 1),
        backward=0.6 * 10 ** numbers.uniform(-1, 1),
        gradient_bytes=int(10 ** numbers.uniform(5, 8)),
        activation_bytes=int(10 ** numbers.uniform(3, 6.5)),
        bandwidth=10 ** numbers.uniform(6.5, 9.5),
        pool_is_elsewhere=numbers.random() < 0.5,
        copy_bandwidth=10 ** numbers.uniform(8, 10.5),
        may_split=numbers.random() < 0.8,
    )
    profile, count = job.profile, len(job.profile.layers) - 2
    spread = [numbers.uniform(0.7, 1.3) for _ in range(count)] if numbers.random() < 0.5 else [1.0] * count
    sent = profile.activation_bytes[0]
    kept = [int(sent * share * numbers.choice((2, 8, 30))) for share in spread]
    nothing = LayerBytes(saved=0, outputs=0, forward=0, backward=0)
    return replace(
        job,
        profile=replace(
            profile,
            forward=(0.0, *(time * share for time, share in zip(profile.forward[1:-1], spread, strict=True)), 0.0),
            backward=(0.0, *(time * share for time, share in zip(profile.backward[1:-1], spread, strict=True)), 0.0),
            layers=(nothing, *(LayerBytes(saved=k, outputs=sent, forward=k, backward=k) for k in kept), nothing),
        ),
    )


def random_constraints(numbers: random.Random, job: TrainingJob) -> Constraints:
    """Between one and all of the knobs pinned, each to a value that the search may take by itself."""
    most = min(8, len(job.trace.blocks) // job.pp)
    segments = numbers.randint(1, most)
    name = numbers.choice(("1f1b", "gpipe", "zb_h1") if segments == 1 else ("aiao", "interleaved"))
    if name == "zb_h1" and not job.may_split:
        name = "1f1b"
    settings: dict[str, str] = {}
    if job.memory_limit is not None:
        settings = {
            "recompute": numbers.choice(("none", "full", "blocks", "blocks:2")),
            "offload": numbers.choice(("none", "activations") if job.pool_is_elsewhere else ("none",)),
        }
    fields: dict[str, Any] = {
        "segments": segments,
        "schedule": name,
        "dp_sync": numbers.choice(("early", "zero1")) if job.dp > 1 else "early",
        "bucket_bytes": numbers.choice((0, 1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 50)),
    }
    kept = [key for key in fields if numbers.random() < 0.5]
    if "schedule" in kept and "segments" not in kept:
        kept.append("segments")
    pinned = tuple((key, text) for key, text in settings.items() if numbers.random() < 0.5)
    return Constraints(**{key: fields[key] for key in kept}, settings=pinned)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.full) for n in range(6, 200))])
def test_freedom_never_hurts(seed: int) -> None:
    numbers = random.Random(seed)
    job = random_job(numbers)
    if numbers.random() < 0.6:
        needs = search(job, Constraints(segments=1, schedule="1f1b", dp_sync="early")).memory_bytes
        job = replace(job, memory_limit=int(needs * numbers.uniform(0.4, 1.1)))
    constraints = random_constraints(numbers, job)
    free = search(job)
    try:
        pinned = search(job, constraints)
    except ConfigError:  # what is pinned has no effect, or none fits it
        return
    if job.memory_limit is not None and pinned.memory_bytes > job.memory_limit:
        return
    assert job.memory_limit is None or free.memory_bytes <= job.memory_limit, f"{constraints} fits: {free.table}"
    assert free.step_ms <= pinned.step_ms * EQUAL, f"{constraints}: {pinned.table}\n{free.table}"


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.full) for n in range(5, 100))])
def test_nor_where_stages_links_and_what_travels_differ(seed: int) -> None:
    """Ranks of several speeds, borders with links of their own (of a fixed cut), and sends that delay computing."""
    numbers = random.Random(3000 + seed)
    job = random_job(numbers)
    network = job.network
    job = replace(
        job,
        stage_times=tuple(numbers.choice((1.0, 1.0, 1.3, 4.8)) for _ in range(job.pp)),
        network=replace(network, toll=numbers.choice((0.0, 0.3, 0.8)) / network.bandwidth),
    )
    constraints, fixed = random_constraints(numbers, job), Constraints()
    if numbers.random() < 0.5:
        segments = constraints.segments or 1
        ranges = cut(job, segments)
        rates = tuple(network.pp_bandwidth * 10 ** numbers.uniform(-1.3, 0.3) for _ in ranges[1:])
        job = replace(job, links=(rates, rates))
        fixed = Constraints(ranges=ranges)
        constraints = replace(constraints, segments=None, ranges=ranges)
    free = search(job, fixed)
    try:
        pinned = search(job, constraints)
    except ConfigError:  # what is pinned has no effect, or none fits it
        return
    assert free.step_ms <= pinned.step_ms * EQUAL, f"{constraints}: {pinned.table}\n{free.table}"


def test_sends_that_delay_computing_wholly_are_planned() -> None:
    """A measured delay reaches 1 / bandwidth. It is limited to 0.9 of that, and must not exceed this by rounding."""
    constraints, job = Constraints(segments=1, schedule="1f1b", dp_sync="early"), make_job(layers=4)
    for bandwidth in random.Random(0).sample(range(10**6, 10**9), 40):
        free = replace(job.network, dp_bandwidth=bandwidth)
        steps = [
            search(replace(job, network=replace(free, toll=toll)), constraints).step_ms for toll in (0.0, 1 / bandwidth)
        ]
        assert steps[0] < steps[1]


def test_a_slow_stage_gets_fewer_layers() -> None:
    job = make_job(dp=1, pp=2, layers=10, micro_batches=16, bandwidth=1e12)
    even = search(job, Constraints(segments=1))
    assert even.strategy.ranges == ((0, 10), (10, 20))
    slow = replace(job, stage_times=(4.0, 1.0))
    found = search(slow, Constraints(segments=1))
    assert found.strategy.ranges == ((0, 4), (4, 20))
    halves = search(slow, Constraints(ranges=((0, 10), (10, 20))))
    assert found.step_ms < 0.45 * halves.step_ms and even.step_ms < found.step_ms
    assert cut(slow, 2) == ((0, 2), (2, 10), (10, 12), (12, 20))


def every_plan(job: TrainingJob) -> list[Plan]:
    """All plans of a small job without copies: each number of segments, schedule, N, way and size of buckets, and for
    memory each chunk computed again or not."""
    plans = []
    for segments in range(1, len(job.trace.blocks) // job.pp + 1):
        cuts = {cut(job, segments), cut(job, segments, first=0.5), cut(job, segments, last=0.5)}
        for info in schedules.registry():
            if not info.allows(segments) or info.uses_segments != (segments > 1) or info.style != job.style:
                continue
            sizes = [None, *range(1, job.micro_batches + 1)] if info.uses_group_size else [None]
            for ranges, size, bytes_ in product(cuts, sizes, (0, 1 << 20, 1 << 50) if job.dp > 1 else (0,)):
                for way in ("early", "zero1") if job.dp > 1 else ("early",):
                    plans.append(
                        Plan(ranges=ranges, schedule=info.name, group_size=size, modes=way, bucket_bytes=bytes_)
                    )
    if job.memory_limit is None:
        return plans
    spared = []
    for plan in plans:
        # Blocks that are computed again run their backwards whole: what the simulator says of halves is not so.
        texts = {"none", "full"} if plan.schedule == SPLIT else {"none", "blocks", "full", "blocks:2"}
        chunks = len(plan.ranges)
        if 1 < chunks <= 4:
            texts |= {"/".join(words) for words in product(("none", "full"), repeat=chunks)}
        spared += [replace(plan, spared=Spared(Recompute.read(text))) for text in sorted(texts)]
    return spared


GATE = (0, 1, 5, 15)
"""5 and 15 are short of memory: a chunk's recomputation was once read outside of the list of choices, and no chunk was
tried alone."""


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n in GATE else pytest.mark.full) for n in range(50)])
def test_nothing_is_better_than_what_is_found(seed: int) -> None:
    """Eight layers, up to four stages and eight micro-batches, each plan of them simulated."""
    numbers = random.Random(1000 + seed)
    pp = numbers.choice((1, 2, 4))
    job = make_job(
        dp=numbers.choice((1, 2)),
        pp=pp,
        layers=8 // pp,
        micro_batches=numbers.choice((2, 4, 8)),
        gradient_bytes=int(10 ** numbers.uniform(5.5, 7.5)),
        activation_bytes=int(10 ** numbers.uniform(3, 6)),
        bandwidth=10 ** numbers.uniform(7, 9),
    )
    count = len(job.profile.layers) - 2
    sent = job.profile.activation_bytes[0]
    layer = LayerBytes(saved=10 * sent, outputs=sent, forward=10 * sent, backward=10 * sent)
    nothing = LayerBytes(saved=0, outputs=0, forward=0, backward=0)
    job = replace(job, profile=replace(job.profile, layers=(nothing, *(layer,) * count, nothing)))
    if seed % 2:
        needs = search(job, Constraints(segments=1, schedule="1f1b", dp_sync="early")).memory_bytes
        job = replace(job, memory_limit=int(needs * numbers.uniform(0.6, 0.95)))
    best = None
    for plan in every_plan(job):
        step, curves = simulate(job, plan)
        fits = job.memory_limit is None or max(curve.peak.device for curve in curves) <= job.memory_limit
        if fits and (best is None or step.step_ns < best):
            best = step.step_ns
    found = search(job)
    if best is None:
        return
    assert job.memory_limit is None or found.memory_bytes <= job.memory_limit
    assert found.step_ms <= 1.01 * best / 1e6, found.table


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.full) for n in range(3, 20))])
def test_no_mesh_alone_is_better_than_all_together(seed: int) -> None:
    """Also where early gathers of one mesh fit, and another one's zero1 is faster."""
    numbers = random.Random(2000 + seed)
    seconds, parameters = 0.05 * 10 ** numbers.uniform(-1, 1), 10 ** numbers.uniform(5, 7)
    sent = 10 ** numbers.uniform(4, 6)
    bandwidth, kept = 10 ** numbers.uniform(7, 9.5), numbers.choice((2, 8, 30))
    nothing = LayerBytes(saved=0, outputs=0, forward=0, backward=0)
    size = int(sent * kept)
    layer = LayerBytes(saved=size, outputs=int(sent), forward=size, backward=size)

    def job_of(pp: int, limit: int | None) -> TrainingJob:
        layers, micro_batches = 16 // pp, 2 * pp
        made = make_job(
            dp=8 // pp, pp=pp, layers=layers, micro_batches=micro_batches, memory_limit=limit,
            forward=seconds * layers * micro_batches, backward=2 * seconds * layers * micro_batches,
            gradient_bytes=int(parameters) * layers, activation_bytes=int(sent), bandwidth=bandwidth,
        )  # fmt: skip
        return replace(made, profile=replace(made.profile, layers=(nothing, *(layer,) * 16, nothing)))

    usual = Constraints(segments=1, schedule="1f1b", dp_sync="early")
    limit = int(search(job_of(4, None), usual).memory_bytes * numbers.uniform(0.3, 1.1))
    jobs = [job_of(pp, limit) for pp in (1, 2, 4, 8)]
    together = decide_jobs(jobs, Constraints(), lambda: True)
    alone = [decide_jobs([job], Constraints(), lambda: True)[0] for job in jobs]
    fitting = [one.best.step_ns for one in alone if one.best is not None and one.fits]
    found = [one.best.step_ns for one in together if one.best is not None and one.fits]
    assert bool(found) == bool(fitting)
    assert not fitting or min(found) <= EQUAL * min(fitting)


def test_the_answer_does_not_depend_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    job = random_job(random.Random(7))
    found = []
    for cores in (1, 2, 5):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        found.append(search(job))
    assert found[0] == found[1] == found[2]


def test_progress_is_told_and_may_end_the_search() -> None:
    job = make_job(layers=8, micro_batches=8)
    seen = []
    found = search(job, progress=lambda number, state: seen.append((number, state.simulated, state.best_ns)))
    assert [simulated for _, simulated, _ in seen] == sorted(simulated for _, simulated, _ in seen)
    assert seen[-1][0] == 0 and found.step_ms <= 1.003 * seen[-1][2] / 1e6

    def enough(number: int, state: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(job, progress=enough)
