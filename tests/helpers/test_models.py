"""The tiny models and batches are what their docstrings promise."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import data, models


@pytest.mark.parametrize("name", sorted(models.MODELS))
@pytest.mark.parametrize("tied", [False, True])
def test_same_seed_same_model(name: str, tied: bool) -> None:
    config = models.MODELS[name](layers=2, tied=tied)
    one, two = models.build(config, dtype=torch.float64), models.build(config)
    assert all(torch.equal(a.float(), b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert (one.get_input_embeddings().weight is one.get_output_embeddings().weight) == tied
    batch = data.batch(3, 12, ragged=True)
    assert torch.isfinite(one(**batch).loss)
    assert all(p.is_meta for p in models.build(config, device="meta").parameters())


def test_plain_model_and_data() -> None:
    model = models.build_plain(layers=2, tied=True, dtype=torch.float64)
    batch = data.batch(4, 10, padded=True, empty_rows=[2])
    model(**batch).backward()
    assert all(p.grad is not None for p in model.parameters())
    kept = (batch["labels"] != data.IGNORED).sum(1)
    assert kept[2] == 0 and len({int(k) for k in kept}) > 2 and int(kept.max()) <= 10
    assert batch["input_ids"].min() >= 1 and batch["input_ids"].max() < 64
    assert not torch.equal(data.byte_ids(50), data.byte_ids(50, start=50))
    assert torch.equal(data.dataset(4, 10)[1]["labels"], data.batch(4, 10)["labels"][1])
