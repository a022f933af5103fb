"""What a rank says of its memory: before there is none left, and when there is none."""

import pytest
import torch

from fold3d import _C
from fold3d.observe.memory import MemoryWatch, is_out_of_memory
from fold3d.plan.memory_options import cheapest_changes, predicted_curves
from fold3d.plan.search import search
from fold3d.plan.strategy import Constraints
from tests.plan.jobs import make_job

CPU = torch.device("cpu")
HUGE = 1 << 60


@pytest.fixture
def counting():
    _C.count_cpu_bytes(False)  # of an earlier test's
    yield
    _C.count_cpu_bytes(False)


def test_a_warning_before_the_limit_and_only_once(counting):
    asked = []

    def changes():
        asked.append(1)
        return ['recompute="full": 1 MB, a step takes +30 %']

    watch = MemoryWatch(CPU, 10_000_000, None, changes=changes)
    assert watch.warning() is None and not asked
    older = torch.zeros(1)
    watch.begin([older])
    base = watch.peak
    kept = torch.zeros((9_500_000 - base) // 4)
    text = watch.warning()
    assert text is not None and "of 10 MB" in text and 'recompute="full"' in text
    assert watch.warning() is None and len(asked) == 1
    del kept
    assert watch.peak >= 9_400_000


def test_tensors_from_before_the_count_are_in_the_peak(counting):
    weights = torch.zeros(1 << 20)
    watch = MemoryWatch(CPU, HUGE, None)
    watch.begin([weights, weights.view(-1)])
    assert 1 << 22 <= watch.peak - _C.peak_cpu_bytes() < (1 << 22) + 1


def test_running_out_of_memory_is_explained():
    watch = MemoryWatch(CPU, None, 5_000_000, changes=lambda: ['dp_sync="zero1": 3 MB'])
    with pytest.raises(MemoryError) as caught, watch.explains():
        torch.empty(HUGE, dtype=torch.uint8)
    message = str(caught.value)
    assert "planned were 5 MB" in message and "this rank had used" in message and 'dp_sync="zero1"' in message
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ValueError, match=r"^other$"), watch.explains():
        raise ValueError("other")
    assert not is_out_of_memory(RuntimeError("other")) and is_out_of_memory(MemoryError())


def test_the_cheapest_changes_need_less_and_come_in_order():
    job = make_job(layers=8, micro_batches=8, activation_bytes=1 << 20, bandwidth=1e10)
    found = search(job, Constraints(segments=4, schedule="aiao", dp_sync="early"))
    changes = cheapest_changes(job, found.strategy, count=10)
    settings = [change.setting for change in changes]
    assert 'recompute="full"' in settings and 'dp_sync="zero1"' in settings
    assert all(change.bytes < found.memory_bytes for change in changes)
    assert [change.slower for change in changes] == sorted(change.slower for change in changes)
    again = next(change for change in changes if change.setting == 'recompute="full"')
    assert again.slower > 0.1
    assert max(curve.peak.device for curve in predicted_curves(job, found.strategy)) == found.memory_bytes
