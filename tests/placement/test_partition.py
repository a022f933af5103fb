"""split_ranges(): where a model is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fold3d.errors import ConfigError
from fold3d.placement.partition import split_ranges
from tests.trace.chains import record
from tests.trace.test_capture import Skipping
from tests.trace.zoo import build


def test_the_head_counts() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=64, n_head=4, vocab_size=4096))
    ranges = split_ranges(record(model), 2)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 8
    assert ranges[0][1] == ranges[1][0]
    assert ranges[0][1] > 4  # logits cost more than the embedding


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_ranges_cover_the_blocks(chunks: int) -> None:
    recorded = record(build("llama"))
    ranges = split_ranges(recorded, chunks)
    recorded.check_ranges(ranges)
    assert len(ranges) == chunks


def test_more_chunks_than_blocks() -> None:
    with pytest.raises(ConfigError, match=r"5 chunks \(pp \* segments\).* has 4 blocks; lower segments or pp"):
        split_ranges(record(build("llama")), 5)


def test_forbidden_borders_are_avoided() -> None:
    free = record(Skipping("block"), {"x": torch.zeros(2, 8)})
    recorded = replace(free, borders=("", "", "", "a reason", "a reason"))
    assert split_ranges(recorded, 3) == [(0, 1), (1, 2), (2, 5)]
    with pytest.raises(ConfigError, match=r"4 chunks .* 5 blocks, and it can be cut at 2 of 4 borders only"):
        split_ranges(recorded, 4)
