"""A user's model in which the batch decides what runs behind the blocks trains with replicas as in the stock Trainer.

Each replica's first micro-batch decided otherwise: parameters were laid out by that, so gradients of one head were
added to those of another (of equal shape), or buckets had other sizes. tests/dist/test_choosing.py has more of these.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import fold3d
from tests.helpers import models
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, stock_arguments

pytestmark = pytest.mark.dist

STEPS = 4


class Choosing(transformers.GPT2LMHeadModel):
    """One or two modules between the last block and the head; the first token says which of them runs."""

    def __init__(self, config: Any, modules: int) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.extra = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(modules))

    def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
        hidden = self.transformer(input_ids=input_ids).last_hidden_state
        choice = int(input_ids[0, 0]) % 2
        if choice < len(self.extra):
            hidden = hidden + self.extra[choice](hidden)
        logits = self.lm_head(hidden)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def train(folder: str, modules: int, total: int, layout: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
    """Returns gradient norms and weights; `layout` None: of the stock Trainer.

    Args:
        total: micro-batches of a step, over all replicas.
    """
    torch.manual_seed(5)
    model = Choosing(models.gpt2_config(layers=4), modules).double()
    rows = []
    for number in range(total * STEPS):
        ids = torch.randint(6, models.VOCABULARY, (8,))
        ids[0] = 4 + (number + number // 4) % 2
        rows.append({"input_ids": ids, "labels": ids})
    job = Job(folder, arguments={"max_steps": STEPS, "train_sampling_strategy": "sequential", "adam_epsilon": 1e-4})
    named = stock_arguments(job) | {"per_device_train_batch_size": 1}
    if layout is None:
        args = transformers.TrainingArguments(**named | {"gradient_accumulation_steps": total})
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        weights = trainer.model.state_dict()
    else:
        own = fold3d.TrainingArguments(**named | {"gradient_accumulation_steps": total // layout["dp"]} | layout)
        trainer = fold3d.Trainer(model=model, args=own, train_dataset=rows)
        trainer.train()
        weights = trainer.engine.state_dict()["model"]
        trainer.engine.close()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
    return norms, {name: tensor.detach().clone() for name, tensor in weights.items()}


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2, "segments": 1}], ids=["dp2", "dp2-pp2"])
@pytest.mark.parametrize("modules", [1, 2], ids=["a branch", "two heads"])
def test_equals_the_stock_trainer(ranks: RankPool, tmp_path: Any, modules: int, layout: dict[str, Any]) -> None:
    norms, weights = train(str(tmp_path), modules, 4, None)
    world = layout["dp"] * layout.get("pp", 1)
    for mine, own in ranks.run(train, world, str(tmp_path), modules, 4, layout, timeout=300):
        assert mine == pytest.approx(norms, rel=1e-6)
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-10, msg=name)
