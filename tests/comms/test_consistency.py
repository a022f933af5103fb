"""Stages of a replica notice that they were given different batches, wherever the batches lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fold3d.comms import consistency
from fold3d.comms.consistency import fingerprint


def batches() -> list[dict[str, Tensor]]:
    ids = torch.arange(24).reshape(2, 12)
    return [{"input_ids": ids + k, "mask": ids > 3, "pixels": ids / 7} for k in range(2)]


@pytest.mark.parametrize("on_device", [False, True])
def test_any_difference_shows(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    """A CPU tensor stands in for one on a device, whose values are hashed there."""
    waited: list[int] = []
    if on_device:
        monkeypatch.setattr(consistency, "_is_in_host_memory", lambda _: False)
        hashed = consistency.hashed
        monkeypatch.setattr(consistency, "hashed", lambda samples: waited.append(1) or hashed(samples))
    same = fingerprint(batches())
    assert same == fingerprint(batches()) and 0 <= same < 2**32
    found = {same}
    for number in range(2):
        for name in ("input_ids", "mask", "pixels"):
            for place in ((0, 0), (1, 11)):
                changed = batches()
                value = changed[number][name]
                value[place] = ~value[place] if value.dtype == torch.bool else value[place] + 1
                found.add(fingerprint(changed))
    found |= {fingerprint(batches()[::-1]), fingerprint(batches()[:1])}
    assert len(found) == 15
    assert len(waited) == (16 if on_device else 0), "one number for each step"


def test_swapped_values_and_samples_show() -> None:
    one, other = torch.tensor([1, 2, 3, 3], dtype=torch.uint8), torch.tensor([2, 1, 3, 3], dtype=torch.uint8)
    codes = {int(consistency.hashed(samples)) for samples in ([one, other], [other, one], [one], [other], [one, one])}
    assert len(codes) == 5
