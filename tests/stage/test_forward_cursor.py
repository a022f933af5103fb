"""ForwardCursor: which blocks it passes by itself, and the seeds that the generators have on the way."""

from __future__ import annotations

import pytest
import torch

from fold3d import seeding
from fold3d._C import ForwardCursor, next_seed, seed_inside

GENERATOR = torch.default_generator


def test_seeds_are_what_they_always_were() -> None:
    # Of an independent implementation in Python's whole numbers: masks must not change between versions.
    assert next_seed(0, 0) == 0xF01D000000000000
    assert next_seed(1, 2) == 0xF01D5EEDE31428F0
    assert next_seed((1 << 64) - 1, 1) == 0xF01DB07013091771
    assert seeding.start((1, 2, 3)) == 0xF01DE2E88A91B5C4
    assert seeding.start((0, 0, 0)) == 0xF01D1A6DB89E73ED
    assert seeding.constant_of("layers.0:leave") == 0x1477DCA1C327B4C0


def test_the_chain_moves_on_at_the_end_of_modules_only() -> None:
    cursor = ForwardCursor(2, 5, [GENERATOR])
    assert GENERATOR.initial_seed() == 5
    assert cursor.begin_module(7)
    assert GENERATOR.initial_seed() == seed_inside(5, 7) and seeding.carried() is None
    cursor.end_module(8)
    assert GENERATOR.initial_seed() == next_seed(5, 8) == seeding.carried()
    assert cursor.skip(0, 9)
    assert GENERATOR.initial_seed() == next_seed(next_seed(5, 8), 9)


def test_a_module_inside_another_one_changes_nothing() -> None:
    cursor = ForwardCursor(2, 5, [GENERATOR])
    assert cursor.begin_module(7) and not cursor.begin_module(9)
    assert GENERATOR.initial_seed() == seed_inside(5, 7)
    cursor.leave_module()  # it failed, and somebody caught that
    assert cursor.begin_module(9) and GENERATOR.initial_seed() == seed_inside(5, 9)


def test_a_skipped_block_ends_the_module_around_it_as_one_that_ran() -> None:
    cursor = ForwardCursor(2, 5, [GENERATOR])
    assert cursor.begin_module(7) and cursor.skip(0, 9)
    assert cursor.begin_module(8) and GENERATOR.initial_seed() == seed_inside(next_seed(5, 9), 8)


def test_draws_are_those_of_manual_seed() -> None:
    cursor = ForwardCursor(1, 5, [GENERATOR])
    assert cursor.skip(0, 6)
    drawn = torch.rand(3), torch.randn(3)
    torch.manual_seed(next_seed(5, 6))
    assert all(torch.equal(a, b) for a, b in zip(drawn, (torch.rand(3), torch.randn(3)), strict=True))


def test_skips_the_next_block_in_front_of_the_chunk_only() -> None:
    cursor = ForwardCursor(2, None, [])
    assert not cursor.skip(1, 0) and cursor.position == 0
    assert cursor.skip(0, 0) and cursor.skip(1, 0) and cursor.position == 2
    assert not cursor.skip(2, 0), "the chunk's own"
    assert not cursor.enter(3)
    assert cursor.enter(2) and cursor.position == 3


@pytest.mark.parametrize("with_grad", [True, False])
def test_leaves_unusual_surroundings_to_the_caller(with_grad) -> None:
    with torch.set_grad_enabled(with_grad):
        cursor = ForwardCursor(3, 5, [GENERATOR])
        assert cursor.with_grad is with_grad
        with torch.set_grad_enabled(not with_grad):
            assert not cursor.skip(0, 1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert not cursor.skip(0, 1)
        assert cursor.position == 0 and GENERATOR.initial_seed() == 5
        assert cursor.skip(0, 1)


def test_without_a_seed_generators_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    cursor = ForwardCursor(2, None, [GENERATOR])
    cursor.begin_module(1)
    cursor.end_module(2)
    assert cursor.skip(0, 3)
    assert torch.equal(torch.get_rng_state(), before)


def spoil_generator() -> None:
    """Leaves it as a module does that drew an odd number of normal values, of which it keeps one."""
    torch.normal(torch.zeros(3, dtype=torch.float64), 1.0)


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 9, 21])
def test_seeds_known_ahead_leave_the_same_states(blocks) -> None:
    constants = [17 * block + 1 for block in range(blocks)]
    cursor, seed = ForwardCursor(blocks, 5, [GENERATOR], constants), 5
    for block, constant in enumerate(constants):
        spoil_generator()
        assert cursor.skip(block, constant)
        seed = next_seed(seed, constant)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(state, torch.get_rng_state()) and GENERATOR.initial_seed() == seed


@pytest.mark.parametrize("moves_at", [0, 1, 7, 8])
def test_seeds_known_ahead_allow_for_modules_between_the_blocks(moves_at) -> None:
    constants = list(range(100, 116))
    cursor, seed = ForwardCursor(16, 5, [GENERATOR], constants), 5
    for block, constant in enumerate(constants):
        if block >= moves_at:
            cursor.begin_module(3)
            cursor.end_module(4)
            seed = next_seed(seed, 4)
        assert cursor.skip(block, constant)
        seed = next_seed(seed, constant)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(state, torch.get_rng_state())


def test_other_constants_than_announced_decide() -> None:
    cursor = ForwardCursor(5, 5, [GENERATOR], [1, 2, 3, 4, 5])
    assert cursor.skip(0, 1) and cursor.skip(1, 22)
    assert GENERATOR.initial_seed() == next_seed(next_seed(5, 1), 22)


def test_generators_of_the_list_get_the_same_seed() -> None:
    other = torch.Generator()
    assert ForwardCursor(4, 5, [GENERATOR, other], [1, 2, 3, 4]).skip(0, 1)
    assert torch.equal(GENERATOR.get_state(), other.get_state())
