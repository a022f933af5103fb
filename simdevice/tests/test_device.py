"""The simulated device: streams, events, memory, copies, errors, random numbers and autograd, as on CUDA."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import RankPool

PROGRAMS = "simdevice.tests.programs"


@pytest.mark.parametrize(
    "name",
    [
        "streams_and_events",
        "two_devices",
        "copies",
        "memory_of_streams",
        "memory_that_nobody_wrote",
        "errors",
        "random_numbers",
        "tied_weights_stay_tied",
        "default_dtypes",
        "autocast",
        "backward_on_the_streams_of_forward",
    ],
)
def test_device(name: str, sim_ranks: RankPool) -> None:
    sim_ranks.run(f"{PROGRAMS}:run", 1, name)


@pytest.mark.parametrize("jittered", [False, True])
def test_training_has_the_bits_of_the_cpu(jittered: bool, sim_ranks: RankPool) -> None:
    sim_ranks.run(f"{PROGRAMS}:training_as_on_the_cpu", 1, jittered)


def test_a_call_begins_on_the_first_device(sim_ranks: RankPool) -> None:
    """Whatever one before it left: engines of several ranks make their own current. Kernels that were queued on that
    one, as `sim.sleep`, would delay nothing on the first."""
    for _ in range(2):
        assert sim_ranks.run(f"{PROGRAMS}:change_device", 2) == [0, 0]
