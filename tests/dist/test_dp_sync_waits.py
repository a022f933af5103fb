"""DP.sync is waited for where it must be and nowhere else, and every wait is accounted for."""

from __future__ import annotations

import pytest
import torch

from tests.dist import dp_sync_waits as jobs
from tests.helpers.ranks import RankPool

LAYERS = [f"layers.{layer}.linear" for layer in range(jobs.LAYERS)]


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_a_layer_waits_for_its_own_parameters_only(ranks: RankPool, dp_sync: str) -> None:
    for seen in ranks.run(jobs.order_of_waits, 2, dp_sync):
        first = [step for layer in LAYERS for step in (f"wait {layer}", layer)]
        assert seen == first + LAYERS * (jobs.MICRO_BATCHES - 1)


def test_early_gathers_do_not_wait_for_the_vote(ranks: RankPool) -> None:
    assert ranks.run(jobs.gathered_before_the_vote, 4) == [(2, 2)] * 4


@pytest.mark.parametrize("dp_sync", ["early", "zero1"])
def test_whoever_reads_weights_waits_on_the_step_s_breakdown(ranks: RankPool, dp_sync: str) -> None:
    for found in ranks.run(jobs.breakdowns, 2, dp_sync):
        nobody, _, waited = found.pop("nobody")
        assert waited == 0 and nobody < len(LAYERS) * jobs.WAIT * 1e3
        for exposed, length, waited in found.values():
            assert waited == len(LAYERS)
            assert length >= exposed >= waited * jobs.WAIT * 1e3


@pytest.mark.parametrize("hosts", ["xxy", "xyy", "xyx"])
def test_ranks_of_a_host_share_a_gate_wherever_the_others_are(ranks: RankPool, hosts: str) -> None:
    found = ranks.run(jobs.arbiters, 3, list(hosts))
    by_host: dict[str, set[str]] = {}
    for host, (names, left) in zip(hosts, found, strict=True):
        assert len(names) == 1 and not left
        by_host.setdefault(host, set()).update(names)
    assert all(len(names) == 1 for names in by_host.values())
    assert len(set().union(*by_host.values())) == len(by_host)


@pytest.mark.parametrize("hosts", ["xyz", "xxx"])
def test_ranks_share_nothing_where_each_or_none_needs_a_card(ranks: RankPool, hosts: str) -> None:
    assert ranks.run(jobs.arbiters, 3, list(hosts)) == [([], [])] * 3


@pytest.mark.parametrize("hosts", ["xxxx", "xxyy", "xyxy", "xxyz"])
def test_messages_stop_the_card_of_their_host_where_the_simulator_sends_them_through_it(
    ranks: RankPool, hosts: str
) -> None:
    found = ranks.run(jobs.traffic_of_an_engine, 4, hosts)
    assert [messages > 0 for messages, _ in found] == jobs.simulated_messages(hosts)
    assert all(len(names) == (hosts != "xxxx") for _, names in found)


def test_a_gate_that_is_not_finished_leaves_nothing_behind(ranks: RankPool) -> None:
    assert ranks.run(jobs.broken_gate, 2) == [[], []]


def test_a_better_schedule_is_taken_and_changes_no_number(ranks: RankPool) -> None:
    expected = jobs.alone(6)
    results = ranks.run(jobs.another_schedule, 4)
    for losses, weights, seen in results:
        assert [seen["schedule"]] == seen["asked"] and losses == results[0][0]
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)
    assert len({(seen["csv"], seen["strategy"]) for _, _, seen in results}) == 1


def test_layers_are_timed_as_the_job_computes_them(ranks: RankPool) -> None:
    for seen in ranks.run(jobs.timed_under, 2):
        assert seen and all(kind == torch.bfloat16 for kind in seen)


def test_an_engine_closed_in_its_own_backward_waits_for_nothing(ranks: RankPool) -> None:
    found = ranks.run(jobs.close_in_the_backward, 4)
    text, seconds = found[0]
    assert "the engine was closed in the middle of step 3" in text and seconds < jobs.CLOSING_TIMEOUT / 2
    assert all(other and taken < 0.75 * jobs.CLOSING_TIMEOUT for other, taken in found[1:])


def test_before_the_first_step_there_is_no_gradient(ranks: RankPool) -> None:
    assert ranks.run(jobs.norm_of_nothing, 2) == [0.0, 0.0]


def test_state_of_what_is_frozen_now_is_left_out(ranks: RankPool) -> None:
    for names in ranks.run(jobs.thawed, 2):
        assert names == [f"layers.{k}.linear.{kind}" for k in range(1, jobs.LAYERS) for kind in ("weight", "bias")]
