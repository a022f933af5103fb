"""Loss, gradient norm, parameters and evaluation with tensor parallelism are those of one process, to 1e-10 in fp64."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest

import fold3d
from fold3d.device import default_device
from fold3d.errors import RankError
from fold3d.plan.strategy import parse
from tests.dist import parity_extra, parity_jobs
from tests.dist.parity_cases import Case
from tests.dist.parity_checks import TOLERANCE, assert_all_names, assert_equal, assert_ranks_agree
from tests.helpers.ranks import RankPool

MOST_RANKS = 8
FAMILIES = {
    2: ("gpt2", "llama", "bert", "opt", "plain"),
    4: ("gpt2-4", "llama", "bert", "plain"),
    8: ("gpt2-8", "plain"),
}
"""By tp: what divides. With tp=4 two ranks share each key head of Llama, whose gradients are summed over them."""
SETTINGS: dict[str, tuple[object, ...]] = {
    "dp_sync": ("early", "zero1", "serial"),
    "tied": (True, False),
    "recompute": (False, True),
    "tp_overlap": ("sub", "none", "sub"),
    "transport": ("auto", "auto", "c10d"),
    "labels": ("full", "ragged", "padded"),
    "sequence_parallel": ("auto", "auto", False, "auto", "auto"),
}

reference = functools.cache(parity_jobs.train_alone)
evaluation = functools.cache(parity_extra.evaluate_alone)


def layouts() -> list[tuple[int, int, int, int]]:
    """Returns every (dp, tp, pp, segments) with tensor parallelism of at most 8 ranks and two segments."""
    sizes = itertools.product((1, 2, 4), FAMILIES, (1, 2, 4), (1, 2))
    return [layout for layout in sizes if layout[0] * layout[1] * layout[2] <= MOST_RANKS]


def grid() -> list[Case]:
    """Returns all layouts, each with two families and numbers of micro-batches, the other settings cycling."""
    families = {tp: itertools.cycle(names) for tp, names in FAMILIES.items()}
    cycles = {name: itertools.cycle(values) for name, values in SETTINGS.items()}
    cases = []
    for number, (dp, tp, pp, segments) in enumerate(layouts()):
        for m in (pp, 2 * pp + 1):
            settings = {name: next(values) for name, values in cycles.items()}
            if dp == 1:
                settings["dp_sync"] = "auto"
            if pp == 1:
                settings["transport"] = "auto"
            schedule = (
                ("1f1b", "gpipe")[number % 2] if segments == 1 else ("aiao", "interleaved")[number % 2 and m >= pp]
            )
            family = next(families[tp])
            layers = 8 if pp * segments > 4 else 4
            layout = {"dp": dp, "tp": tp, "pp": pp, "segments": segments, "m": m, "schedule": schedule}
            cases.append(Case(**layout, layers=layers, family=family, **settings))
    return cases


GRID = grid()


OTHERS = ("gpt_neox", "bloom", "mixture", "vit")
"""Queries, keys and values in one matrix head after head, slopes per head, experts, and images of five classes."""
OTHER_LAYOUTS = [(1, 2, 1, 1), (2, 2, 1, 1), (1, 2, 2, 2), (2, 2, 2, 1), (1, 4, 1, 1), (1, 4, 2, 1), (2, 4, 1, 1)]


def others() -> list[Case]:
    """Returns each further family in each layout; the other settings cycle, another one first for each family."""
    cases = []
    for shift, family in enumerate(OTHERS):
        for number, (dp, tp, pp, segments) in enumerate(OTHER_LAYOUTS):
            settings = {
                "tp_overlap": ("sub", "none")[(number + shift) % 2],
                "recompute": (number + shift) % 3 == 0,
                "labels": ("full", "ragged", "padded")[(number + shift) % 3],
                "tied": number % 4 < 2,
                "dp_sync": ("early", "zero1")[number // 2 % 2] if dp > 1 else "auto",
                "schedule": "aiao" if segments > 1 else "1f1b",
                "sequence_parallel": (number + shift) % 4 != 3,
            }
            layout = {"dp": dp, "tp": tp, "pp": pp, "segments": segments, "m": (1, 2, 3)[number % 3]}
            cases.append(Case(**layout, family=family, **settings))
    return cases


def check(pool: RankPool, case: Case) -> list[parity_jobs.Result]:
    expected = reference(case.alone())
    assert min(expected.norms) > parity_jobs.MAX_NORM, "the case must clip"
    results = pool.run(parity_jobs.train, case.ranks, case, timeout=150.0)
    assert_equal(results[0], expected, TOLERANCE[case.dtype])
    assert_all_names(results[0], parity_jobs.build(case))
    assert_ranks_agree(results, case)
    return results


def matrices_of_blocks(case: Case) -> set[str]:
    """Returns the names of parameters of blocks with two dimensions or three, routers of experts apart."""
    found = parity_jobs.build(case).named_parameters()
    return {name for name, p in found if p.ndim in (2, 3) and ".0." in name and "gate.weight" not in name}


@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_grid(ranks8: RankPool, case: Case) -> None:
    check(ranks8, case)


@pytest.mark.parametrize("case", others(), ids=lambda case: case.name)
def test_other_families(ranks8: RankPool, case: Case) -> None:
    """And each matrix of their blocks is divided."""
    held = check(ranks8, case)[0].digests[0]
    divided = {name.partition(" ")[0] for name in held if " " in name}
    matrices = matrices_of_blocks(case)
    assert len(matrices) >= 4 and matrices <= divided, matrices - divided


def test_the_grid_shows_every_setting() -> None:
    """Each family with replicas and with stages, each setting with each tp."""
    for tp, families in FAMILIES.items():
        mine = [case for case in GRID if case.tp == tp]
        assert {case.family for case in mine if case.dp > 1} == {case.family for case in mine if case.pp > 1}
        assert {case.family for case in mine} == set(families)
        for name, values in SETTINGS.items() if tp < MOST_RANKS else ():
            assert {getattr(case, name) for case in mine} >= set(values)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp_overlap", ["none", "sub"])
def test_a_stack_that_returns_all_hidden_states(ranks: RankPool, tp_overlap: str, pp: int) -> None:
    """Behind the last block, where the head runs by itself, nothing of them is a part that would be gathered."""
    check(ranks, Case(tp=2, pp=pp, m=2, family="deberta", tp_overlap=tp_overlap))


@pytest.mark.parametrize("layout", [(1, 2), (2, 1), (2, 2)])
def test_code_that_caches_tensors(ranks: RankPool, layout: tuple[int, int]) -> None:
    """Nothing of what was cached while the model was recorded or divided is there when it trains."""
    tp, pp = layout
    check(ranks, Case(tp=tp, pp=pp, m=2, family="beit"))


TRAINER = [
    Case(dp=2, tp=2, m=2, family="gpt2", through="trainer"),
    Case(tp=2, pp=2, segments=2, m=3, family="llama", schedule="aiao", through="trainer", labels="ragged"),
    Case(tp=2, pp=2, m=2, family="vit", through="trainer", labels="ragged"),
]


@pytest.mark.parametrize("case", TRAINER, ids=lambda case: case.name)
def test_trainer(ranks: RankPool, case: Case) -> None:
    check(ranks, case)


@pytest.mark.parametrize("layout", [(1, 2, 1, 1), (2, 2, 1, 1), (1, 2, 2, 2), (1, 4, 1, 1)])
@pytest.mark.parametrize("family", ["gpt2-4", "llama", *OTHERS])
def test_evaluation(ranks: RankPool, layout: tuple[int, int, int, int], family: str) -> None:
    dp, tp, pp, segments = layout
    schedule = "aiao" if segments > 1 else "1f1b"
    case = Case(dp=dp, tp=tp, pp=pp, segments=segments, m=2, family=family, schedule=schedule)
    expected = evaluation(replace(case, tp=1, pp=1, segments=1, schedule="1f1b"))
    for found in ranks.run(parity_extra.evaluate, case.ranks, case, timeout=150.0):
        assert found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bert", {}),
        ("plain", {}),
        ("gpt2", {"tp_overlap": "none"}),
        ("gpt2", {"tp_overlap": "sub", "recompute": True}),
        ("llama", {"tp_overlap": "sub"}),
        ("opt", {"tp_overlap": "none", "recompute": True}),
        ("gpt_neox", {"tp_overlap": "sub", "recompute": True}),
        ("bloom", {"tp_overlap": "none"}),
        ("mixture", {"tp_overlap": "sub"}),
        ("vit", {"tp_overlap": "none", "recompute": True}),
        ("llama", {"tp_overlap": "none", "labels": "left"}),
    ],
)
def test_dropout_is_that_of_one_rank(ranks: RankPool, family: str, settings: dict[str, Any]) -> None:
    """Masks depend on (seed, step, micro-batch, module), not on the layout: of a mask over heads each rank has those of
    its heads, of one over samples each half has those of its samples."""
    case = Case(tp=2, pp=2, m=2, family=family, dropout=0.2, **settings)
    ours = ranks.run(parity_jobs.train, 4, case, timeout=150.0)
    theirs = ranks.run(parity_jobs.train, 2, replace(case, tp=1), timeout=150.0)
    assert_equal(ours[0], theirs[0], TOLERANCE["float64"])
    assert_ranks_agree(ours, case)


def take_over(case: Case) -> list[float]:
    """Returns what two engines over one model say of the same batch, before and after the second one trains on."""
    with parity_jobs.precision(case):
        model = parity_jobs.build(case)
        first = parity_jobs.engine_of(case, model)
        batch = parity_jobs.batch_of(first, case, 0)
        first.step(batch)
        found = [first.evaluate(batch).item()]
        second = parity_jobs.engine_of(case, model)
        found.append(second.evaluate(batch).item())
        second.step(batch)
        found.append(second.evaluate(batch).item())
        second.close()
    return found


@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1), (1, 2, 2)])
def test_a_later_engine_takes_over(ranks: RankPool, layout: tuple[int, int, int]) -> None:
    """It puts its own forwards on the shards that the first has left."""
    dp, tp, pp = layout
    case = Case(dp=dp, tp=tp, pp=pp, m=2, family="gpt2")
    for before, taken_over, after in ranks.run(take_over, case.ranks, case, timeout=150.0):
        assert before == taken_over > after


def other_batch(case: Case, odd: int, change: str, evaluate: bool) -> str:
    """Returns the error when one rank is given another batch than the rest."""
    engine = parity_jobs.engine_of(case)
    batch = parity_jobs.batch_of(engine, case, 0)
    if engine.topology.rank == odd and change == "values":
        batch["input_ids"][0, 0] += 1
    elif engine.topology.rank == odd:
        batch = {name: value[:, :-2] for name, value in batch.items()}
    try:
        engine.evaluate(batch) if evaluate else engine.step(batch)
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("change", ["values", "lengths"])
def test_shards_must_get_the_same_batch(ranks: RankPool, change: str, evaluate: bool) -> None:
    """Told before any of them runs a layer: with other lengths the sums in layers would not even fit together."""
    case = Case(tp=2, pp=2, m=1, family="plain")
    for text in ranks.run(other_batch, 4, case, 3, change, evaluate, timeout=100.0):
        assert "the (stage, shard) [(1, 1)] of replica 0 were given another batch than rank 2" in text, text


def planned(case: Case, memory_limit: str | None) -> str:
    """Returns the strategy that the planner chose, once it has trained a step."""
    engine = parity_jobs.engine_of(case, segments="auto", schedule="auto", memory_limit=memory_limit)
    engine.step(parity_jobs.batch_of(engine, case, 0))
    text = str(engine.strategy)
    engine.close()
    return text


def test_the_planner_counts_with_shards(ranks: RankPool) -> None:
    case = Case(tp=2, pp=2, m=4, family="llama")
    found = ranks.run(planned, 4, case, None, timeout=150.0)
    assert len(set(found)) == 1 and found[0].startswith("dp=1 tp=2 pp=2 micro_batches=4 ")
    assert str(parse(found[0])) == found[0]


def refused(**settings: Any) -> str:
    case = Case(family="gpt2")
    example = parity_jobs.on(default_device(), parity_jobs.replica_batch(case, 0, 0))  # an accelerator waits for one
    try:
        fold3d.Engine(parity_jobs.build(case), fold3d.ParallelConfig(segments=1, **settings), example=example)
    except fold3d.errors.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tp": 4}, "4"),
        ({"tp": 2, "tp_plan": {"transformer.h.*.mlp.nothing": "replicate"}}, "nothing"),
        ({"tp": 2, "tp_plan": {"transformer.h.*.mlp.c_fc": "diagonally"}}, "diagonally"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(ranks: RankPool, settings: dict[str, Any], message: str) -> None:
    found = ranks.run(refused, settings["tp"], timeout=100.0, **settings)
    assert len(set(found)) == 1 and message in found[0], found
