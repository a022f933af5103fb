"""What a loss function of the user's, or the model behind its blocks, keeps for the log: process 0 has it, whose stage
computes no loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, Variant, assert_same, run_fold3d, run_stock

CUT = [(2, {"pp": 2}), (2, {"pp": 2, "segments": 2})]
EVERY_STEP: dict[str, Any] = {
    "logging_strategy": "steps",
    "logging_steps": 1,
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
}
EVERY_STEP["remove_unused_columns"] = False  # by a forward that takes any


class Sums:
    """A loss function that adds up what it computes."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self.parts: dict[str, list[float]] = {"sizes": []}

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = outputs["logits"][:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        self.total += float(loss.detach())
        self.count += 1
        self.parts["sizes"].append(float(logits.detach().square().mean()))
        return loss / num_items_in_batch


class Logs(transformers.TrainerCallback):  # type: ignore[misc]
    """Adds what it holds to the log, and begins anew."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if logs is not None and "loss" in logs:
            sizes = self.held.parts["sizes"]
            logs.update(total=self.held.total, count=self.held.count, sizes=sum(sizes))
            state.log_history[-1].update(logs)
            self.held.total, self.held.count = 0.0, 0
            sizes.clear()


class OfFunction(Variant):
    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        sums = Sums()
        return named | {"compute_loss_func": sums, "callbacks": [Logs(sums)]}


class OfModel(Variant):
    """The model's own forward keeps them, behind its blocks; `log` reads them."""

    def arguments(self, named: dict[str, Any]) -> dict[str, Any]:
        kind = type(named["model"])

        class Keeping(kind):  # type: ignore[misc, valid-type]
            def forward(self, *args: Any, **options: Any) -> Any:
                out = super().forward(*args, **options)
                self.seen = {"loss": out["loss"].detach(), "rows": out["logits"].shape[0]}
                self.count = getattr(self, "count", 0) + 1
                self.config.problem_type = f"call {self.count}"
                return out

        named["model"].__class__ = Keeping
        named["model"].count = 0
        return named

    def trainer(self, base: type[Any]) -> type[Any]:
        class Trainer(base):  # type: ignore[misc]
            def log(self, logs: dict[str, float], *args: Any) -> None:
                if "loss" in logs:
                    seen = self.model.seen
                    logs.update(seen=float(seen["loss"]), rows=seen["rows"], count=self.model.count)
                    logs["of config"] = int(self.model.config.problem_type.split()[1])
                super().log(logs, *args)

        return Trainer


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("variant", [OfFunction(), OfModel()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(("processes", "layout"), CUT, ids=str)
def test_what_is_kept_of_a_loss_reaches_the_log(
    ranks: RankPool, tmp_path: Any, processes: int, layout: dict[str, Any], variant: Variant
) -> None:
    torch.manual_seed(0)
    job = Job(str(tmp_path), arguments=EVERY_STEP, variant=variant)
    ours, stock = ranks.run(run_fold3d, processes, job, layout), run_stock(job)
    assert stock.column("count") and any(stock.column("count"))
    for one in ours:
        assert_same(one, stock, 1e-10)
