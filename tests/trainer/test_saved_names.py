"""What is saved is read by every class of transformers that reads what the stock Trainer saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, run_fold3d, run_stock

FILE = "checkpoint-1/model.safetensors"
SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "lr_scheduler_type": "constant"}
HEADS = {"gpt2": {"score.weight"}, "llama": {"score.weight"}, "opt": {"score.weight"}}


@pytest.mark.parametrize("family", models.MODELS)
def test_other_heads_load_a_checkpoint(ranks: RankPool, tmp_path: Path, family: str) -> None:
    job = Job(str(tmp_path / "ours"), family=family, arguments=SAVING)
    ranks.run(run_fold3d, 4, job, {"dp": 2, "pp": 2, "segments": 2})
    run_stock(replace(job, folder=str(tmp_path / "stock")))
    assert load_file(tmp_path / "ours" / FILE).keys() == load_file(tmp_path / "stock" / FILE).keys()
    folder = (tmp_path / "ours" / FILE).parent
    _, base = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not base["missing_keys"]
    _, classifier = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert set(classifier["missing_keys"]) == HEADS[family]


def test_the_other_name_of_a_tied_weight_is_read_as_well(ranks: RankPool, tmp_path: Path) -> None:
    """Checkpoints of earlier versions have the weight under lm_head.weight."""
    job = Job(str(tmp_path), arguments=SAVING)
    ranks.run(run_fold3d, 2, job, {"pp": 2})
    file = tmp_path / FILE
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    resumed = replace(job, resume=str(file.parent), arguments=SAVING | {"max_steps": 2, "save_strategy": "no"})
    outcome = ranks.run(run_fold3d, 2, resumed, {"pp": 2})[0]
    whole = run_stock(replace(job, arguments=SAVING | {"max_steps": 2}))
    for name, value in outcome.weights.items():
        assert (value - whole.weights[name]).abs().max() < 1e-10, name
