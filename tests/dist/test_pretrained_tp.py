"""Logits of saved models that ranks read their parts of are those of transformers' from_pretrained, to 1e-5 in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import fold3d
from tests.helpers import data, models
from tests.helpers.ranks import RankPool

VOCABULARY = 131
"""Does not divide: ranks have parts of unequal size."""
HIDDEN = 32
ROWS = 5
LENGTH = 11
CONFIGURATIONS = {
    "gpt2": lambda: models.gpt2_config(hidden=HIDDEN, vocab=VOCABULARY, heads=4),
    "llama": lambda: models.llama_config(hidden=HIDDEN, vocab=VOCABULARY),
    "gpt_neox": lambda: models.gpt_neox_config(hidden=HIDDEN, vocab=VOCABULARY),
}
LAYOUTS = [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2, "segments": 2}]


def save(family: str, folder: Path) -> None:
    """Saves a model in many files, with weights so large that logits differ by far more than 1e-5."""
    model = models.build(CONFIGURATIONS[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=HIDDEN**-0.5)
    model.save_pretrained(folder, max_shard_size="20KB")


def batch() -> dict[str, Tensor]:
    """Returns rows of different lengths, without labels."""
    whole = data.batch(ROWS, LENGTH, vocab=VOCABULARY, padded=True)
    return {name: whole[name] for name in ("input_ids", "attention_mask")}


def empty_model(folder: str) -> nn.Module:
    """Returns the saved model without its weights."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model.eval()


def of_an_engine(folder: str, layout: dict[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the logits on this rank, and its parts of the weights."""
    config = fold3d.ParallelConfig(**({"segments": 1} | layout))
    engine = fold3d.Engine(empty_model(folder), config, weights=folder, example=batch())
    logits = engine.forward(batch(), lambda model, rows: model(**rows).logits)
    held = {name: parameter.detach().clone() for name, parameter in engine.owned.items()}
    engine.close()
    return logits, held


def of_a_trainer(folder: str, output: str, layout: dict[str, int]) -> Tensor:
    """Returns what Trainer.predict returns on this rank, in batches that do not divide the rows."""
    given = {"output_dir": output, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    args = fold3d.TrainingArguments(**given, **layout, weights=folder, per_device_eval_batch_size=2)
    trainer = fold3d.Trainer(model=empty_model(folder), args=args)
    whole = batch()
    rows = [{name: tensor[row] for name, tensor in whole.items()} for row in range(ROWS)]
    logits = torch.from_numpy(trainer.predict(rows).predictions)
    trainer.engine.close()
    return logits


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()))
@pytest.mark.parametrize("family", CONFIGURATIONS)
def test_logits_of_a_saved_model(ranks: RankPool, tmp_path: Path, family: str, layout: dict[str, int]) -> None:
    folder = tmp_path / "saved"
    save(family, folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    whole = dict(model.named_parameters())
    with torch.no_grad():
        expected = model(**batch()).logits
    assert expected.std() > 0.5
    count = layout["tp"] * layout.get("pp", 1)
    found = ranks.run(of_an_engine, count, str(folder), layout, timeout=120.0)
    for logits, held in found:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        matrices = [name for name, tensor in held.items() if tensor.ndim == 2 and "wpe" not in name]
        assert matrices and all(held[name].numel() < whole[name].numel() for name in matrices)
    for logits in ranks.run(of_a_trainer, count, str(folder), str(tmp_path / "out"), layout, timeout=120.0):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
