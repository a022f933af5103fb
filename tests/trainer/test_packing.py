"""Packed sequences: TRL's packing, DataCollatorWithFlattening, borders by cu_seq_lens; as on one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from fold3d.engine.division import number_of_parts
from fold3d.errors import ConfigError
from fold3d.profile.layer_bytes import layer_bytes
from fold3d.stage.micro_batch import split_batch
from fold3d.trace import trace
from fold3d.trace.arguments import form_of
from fold3d.trace.batches import samples_of
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock
from tests.trainer.test_adapters import double_loss

ARGUMENTS = {"gradient_accumulation_steps": 4, "max_steps": 3}


@dataclass
class Flattened(Variant):
    """All samples of a micro-batch in one row."""

    borders: bool
    """Whether the collator also gives cu_seq_lens_q and what belongs to it."""
    attention: str = "sdpa"

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        named["model"].set_attn_implementation(self.attention)
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=self.borders)
        own = {"compute_loss_func": double_loss} if named["model"].config.model_type == "gpt2" else {}
        return named | {"data_collator": collate} | own


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize(
    "processes, layout, borders, attention",
    [
        (2, {"pp": 2, "segments": 2}, False, "eager"),
        (2, {"pp": 2, "segments": 2}, True, "sdpa"),
        (4, {"dp": 2, "pp": 2, "dp_sync": "zero1"}, True, "sdpa"),
        (2, {"tp": 2}, False, "sdpa"),
        (2, {"tp": 2, "tp_overlap": "sub"}, True, "sdpa"),
        (2, {"dp": 2, "recompute": "full"}, False, "sdpa"),
    ],
)
def test_flattened_rows(
    ranks: RankPool, tmp_path: Path, processes: int, layout: dict[str, Any], borders: bool, attention: str
) -> None:
    replicas = layout.get("dp", 1)
    job, stock = (
        Job(
            str(tmp_path / name),
            family="gpt2" if "tp" in layout else "llama",  # Llama's norms compute in single precision
            samples=40,
            arguments=dict(ARGUMENTS),
            variant=Flattened(borders, attention),
        )
        for name in ("ours", "stock")
    )
    found = ranks.run(run_fold3d, processes, job, layout)
    wanted = run_stock(stock, replicas=replicas)
    if replicas > 1:  # the loss of an evaluation batch is that of all replicas' batches, as under DDP
        wanted.metrics = found[0].metrics
    for one in found:
        assert_same(one, wanted, 1e-10)


def packed(*lengths: int) -> dict[str, Any]:
    samples = [{"input_ids": list(range(2, 2 + length))} for length in lengths]
    found: dict[str, Any] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(samples)
    return found


def test_borders_are_no_samples() -> None:
    """A row of 2 + 3 tokens has three borders, which are not three samples."""
    batch = packed(2, 3)
    assert batch["cu_seq_lens_q"].shape == (3,) and batch["input_ids"].shape == (1, 5)
    assert samples_of(batch) is None
    with pytest.raises(ConfigError, match=r"micro_batch_size=1: batch\['cu_seq_lens_q'\].*a row is one sample"):
        number_of_parts(batch, 1)
    with pytest.raises(ValueError, match=r"batch\['cu_seq_lens_q'\].*position_ids that begin at 0"):
        split_batch(batch, 3)
    assert split_batch(batch, 1)[0]["cu_seq_lens_q"].tolist() == [0, 2, 5]


def test_rows_of_other_lengths_are_no_other_form() -> None:
    """The model is not recorded anew for each longest sequence."""
    assert form_of(packed(2, 3)) == form_of(packed(4, 7, 1)) != form_of({"input_ids": torch.ones(1, 5)})


def test_the_planner_counts_the_mask_of_packed_rows() -> None:
    """With sdpa several sequences in a row need a mask of the row's length squared, which one sequence does not."""
    model = models.build(models.llama_config(layers=2))
    ids = torch.arange(32).view(1, 32)

    def needs(positions: Tensor) -> int:
        batch = {"input_ids": ids, "position_ids": positions, "labels": ids}
        return sum(layer.saved for layer in layer_bytes(model, trace(model, example=batch), batch))

    assert needs(torch.arange(16).repeat(2).view(1, 32)) >= needs(ids) + 32 * 32
