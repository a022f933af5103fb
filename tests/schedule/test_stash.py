"""How many activations a rank holds at most."""

from __future__ import annotations

import pytest

from fold3d import schedule
from fold3d.errors import ConfigError
from tests.schedule.cases import sizes, split_backwards


def stash(name, pp, segments, m, **options):
    return schedule.peak_stash(schedule.generate(name, pp=pp, segments=segments, micro_batches=m, **options))


def test_closed_forms():
    """GPipe m; 1F1B pp - stage; Megatron's interleaved, stage 0: p (ns + 1) - 1 (Fold3D eq. 6); AIAO ms ns (eq. 7)."""
    for pp, segments, m in sizes():
        if segments == 1:
            assert stash("gpipe", pp, 1, m) == [m] * pp
            assert stash("1f1b", pp, 1, m) == [min(pp - stage, m) for stage in range(pp)]
            assert stash("zb_h1", pp, 1, m) == [min(pp, m)] * pp  # Qi et al. 2023, section 2.3: 1F1B's on stage 0
            for k in range(1, m + 1):  # Ada-Grouper, section 4
                assert stash("kfkb", pp, 1, m, group_size=k) == [min(k * (pp - stage), m) for stage in range(pp)]
            ahead = [3 if stage == pp - 2 else pp - stage for stage in range(pp)]
            assert stash("shifted_critical_path", pp, 1, m) == [min(a, m) for a in ahead]
        if segments == 2:  # Qi et al. 2024, section 6: what pp stages of 1F1B weigh
            held = stash("zb_v", pp, 2, m)
            assert max(held) <= 2 * pp and (m < 2 * pp - 1 or held == [2 * pp] * pp)
        assert stash("aiao", pp, segments, m) == [m * segments] * pp
        if segments > 1 and m % pp == 0:
            ahead = [(segments - 1) * pp + 2 * (pp - 1 - stage) + 1 for stage in range(pp)]
            assert stash("interleaved", pp, segments, m) == [min(a, segments * m) for a in ahead]
            assert ahead[0] == pp * (segments + 1) - 1


def test_group_size_bounds_the_stash():
    """kFkB holds (pp - stage) groups; a fold with N < m holds less than AIAO."""
    assert stash("fold", 4, 1, 12, group_size=3, turn="all") == [12, 9, 6, 3]
    for group_size in (4, 8):
        held = stash("fold", 4, 2, 16, group_size=group_size, turn="1f1b")
        assert max(held) < 16 * 2
        assert held[-1] == group_size + 1


def test_a_split_backward_holds_until_its_weight_gradient():
    split = split_backwards(schedule.generate("1f1b", pp=2, micro_batches=4))
    assert schedule.peak_stash(split) == [4, 4]
    lowered = schedule.lower(split, reduce=True)
    assert schedule.peak_stash(lowered) == [4, 4]


def test_room_on_both_sides_is_proven():
    made = schedule.generate("aiao", pp=2, segments=2, micro_batches=6)
    offloaded = schedule.lower(made, reduce=False, offload=[True] * 4)
    sizes = {"stash_bytes": (8, 8, 8, 8), "sent_bytes": (1, 1, 1, 0)}
    peaks = schedule.stash_peaks(offloaded, **sizes)
    device, pool = map(max, zip(*peaks, strict=True))
    assert device < 8 * 12 < 2 * pool
    schedule.validate_room(offloaded, device=device, pool=pool, **sizes)
    with pytest.raises(ConfigError, match=r"rank \d.*device"):
        schedule.validate_room(offloaded, device=device - 1, pool=None, **sizes)
    with pytest.raises(ConfigError, match=r"rank \d.*pool"):
        schedule.validate_room(offloaded, device=None, pool=pool - 1, **sizes)
