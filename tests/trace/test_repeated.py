"""Blocks that run several times: one weight in several chunks, as tied embeddings are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.errors import TraceError
from fold3d.placement.parameter_placement import ParameterPlacement
from fold3d.trace import trace
from tests.trace.chains import assert_equal, chained, cuts, ranks_of, record, whole
from tests.trace.stacks import VOCABULARY, build
from tests.trace.zoo import Plain, tokens
from zoo.double import InDouble


def _alone(times: int, *, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A transformer of one block."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    torch.manual_seed(0)
    config = AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=8, hidden_size=16, num_hidden_layers=times, num_attention_heads=4,
        intermediate_size=24, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return AlbertForMaskedLM(config).double(), build("albert")[1]


def _cycles() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two stacks in turns, some of the turns without gradients."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    torch.manual_seed(0)
    config = HrmTextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_layers_per_stack=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=4, H_cycles=2, L_cycles=2, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return HrmTextForCausalLM(config).double(), tokens()


def test_each_run_is_a_block() -> None:
    model, batch = _alone(3)
    recorded = record(model, batch)
    name = "albert.encoder.albert_layer_groups.0"
    assert recorded.blocks == (name,) * 3 and recorded.modules == (name,) and recorded.repeats
    assert recorded.calls == (0, 1, 2)
    assert [value.call for border in recorded.crossings[1:] for one in border for value in one.values] == [0, 1]
    weights = [f"{name}.{parameter}" for parameter, _ in model.get_submodule(name).named_parameters()]
    placement = ParameterPlacement.of(
        [parameter for parameter, _ in model.named_parameters()], recorded, [(0, 1), (1, 2), (2, 3)], 3, recorded.tied
    )
    for weight in weights:  # each stage has a copy, and the first answers for it
        assert placement.readers[weight] == (0, 1, 2) and placement.home(weight) == 0
        assert placement.summed_over(weight).pp == (0, 1, 2)


@pytest.mark.parametrize("recompute", [False, True])
def test_one_block(recompute: bool) -> None:
    model, batch = _alone(4)
    recorded = record(model, batch)
    for ranges in cuts(4):
        ranks = ranks_of(model, recorded, ranges, 2, recompute=recompute)
        assert_equal(chained(ranks, recorded, len(ranges), batch), whole(model, batch))


def test_each_run_draws_masks_of_its_own() -> None:
    model, batch = _alone(4, dropout=0.3)
    recorded = record(model, batch)
    key = (42, 3, 1)
    want = chained(ranks_of(model, recorded, [(0, 4)], 1), recorded, 1, batch, key=key)
    for ranges in cuts(4):
        assert_equal(chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), batch, key=key), want)


def test_stacks_in_turns() -> None:
    model, batch = _cycles()
    recorded = record(model, batch)
    assert len(recorded.blocks) == 12 and len(recorded.modules) == 4
    for ranges in [[(0, 3), (3, 6), (6, 9), (9, 12)], [(0, 5), (5, 12)], [(k, k + 1) for k in range(12)]]:
        with InDouble():  # its norms compute in float32, where gradients in another order differ
            want = whole(model, batch)
            got = chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), batch)
        # What runs without gradients in front of a cut gets zeros where one process has none.
        assert all(not got[1][name].any() for name in got[1].keys() - want[1].keys())
        assert_equal((got[0], {name: got[1][name] for name in want[1]}), want)


def test_a_block_of_several_runs_once_more() -> None:
    class Twice(Plain):
        def between(self, x: Any) -> Any:
            return self.layers[0](x)

    torch.manual_seed(0)
    model = Twice().double()
    recorded = record(model, tokens())
    assert len(recorded.modules) < len(recorded.blocks)
    for ranges in cuts(len(recorded.blocks)):
        got = chained(ranks_of(model, recorded, ranges, 2), recorded, len(ranges), tokens())
        assert_equal(got, whole(model, tokens()))


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.linear(x) / self.runs


class _Again(nn.Module):
    def __init__(self, block: nn.Module, times: int) -> None:
        super().__init__()
        self.embedding, self.blocks, self.times = nn.Embedding(VOCABULARY, 8), nn.ModuleList([block]), times

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for _ in range(self.times):
            x = self.blocks[0](x)
        return x.square().mean()


def test_a_block_that_changes_its_buffers_is_not_cut_between_its_runs() -> None:
    recorded = trace(_Again(_Counting(), 3), example=tokens())
    assert recorded.borders[0] == ""
    for reason in recorded.borders[1:]:
        assert reason == "'blocks.0' runs before and after it, and changes buffers of its own each time"


def test_a_module_that_lies_alone_and_runs_once_is_no_block() -> None:
    with pytest.raises(TraceError, match=r"no blocks found in _Again: .*or with one that runs several times"):
        trace(_Again(nn.Linear(8, 8), 1), example=tokens())


def test_tensor_parallel_ranks_do_not_cut_it() -> None:
    model, batch = _alone(3)
    reasons = record(model, batch).under(2).borders[1:]
    assert all("with tp=2 no model can be cut whose blocks run several times" in reason for reason in reasons)
