"""Mistakes of users, each answered with what is wrong and what to change, on every rank.

Elsewhere: single settings (test_config.py), schedules and their files (schedule/), models that cannot be cut (trace/),
damaged weights and checkpoints (trace/test_materialize.py, checkpoint/, trainer/test_checkpoints.py: test_cut_short),
arguments of the Trainer (trainer/test_arguments.py), ranks that fail (dist/test_failure*.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from fold3d import Engine, ParallelConfig
from fold3d.engine.planning import planner
from fold3d.errors import CheckpointError, ConfigError, Fold3dError, TraceError
from tests.helpers import data, models
from tests.helpers.ranks import RankPool

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    """Four blocks; returns the loss of each row, or their mean."""

    def __init__(self, *, per_row: bool = False, blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.per_row = per_row

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        rows = x.square().mean(-1)
        return rows if self.per_row else rows.mean()


def test_processes_that_nobody_has_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train a model of its own."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for settings in ({}, {"parallel": "auto", "global_batch_size": 8}):
        with pytest.raises(ConfigError, match=r"one of 4 \(WORLD_SIZE\), .* call torch.distributed.init_process_group"):
            Engine(Net(), ParallelConfig(blocks="layers", **settings), example=batch_of(), optimizer=SGD)


def batch_of(rows: int = 4, start: float = 0.0) -> dict[str, Tensor]:
    return {"x": torch.arange(start, start + rows * 4).view(rows, 4) / 16}


def engine(model: nn.Module | None = None, **settings: Any) -> Engine:
    options = {
        name: settings.pop(name) for name in ("optimizer", "weights", "max_grad_norm", "autocast") if name in settings
    }
    config = ParallelConfig(**{"blocks": "layers", "comm_timeout": 8.0, "segments": 1} | settings)
    return Engine(Net() if model is None else model, config, example=batch_of(), **{"optimizer": SGD} | options)


# One process: refused before anything is built


@pytest.mark.parametrize(
    "error, message, settings",
    [
        (ConfigError, r"dp\*tp\*pp = 1\*1\*2 = 2, but the job has 1 process", {"dp": 1, "pp": 2}),
        (
            ConfigError,
            r"dp\*tp\*pp = 4\*1\*1 = 4, .* start it with torchrun --standalone --nproc-per-node 4 ",
            {"dp": 4},
        ),
        (ConfigError, r"5 chunks \(pp \* segments\) .* has 4 blocks; lower segments or pp", {"segments": 5}),
        (ConfigError, r"'zigzag'.*aiao", {"schedule": "zigzag"}),
        (ConfigError, r"segments", {"schedule": "1f1b", "segments": 2}),
        (ConfigError, r"dp_sync='zero1' has no effect with one replica", {"dp_sync": "zero1"}),
        (TraceError, r"blocks='h': .*'layers' \(4 x Linear", {"blocks": "h", "segments": 2}),
        (ConfigError, r"weights='here' has no effect: the model has weights of its own", {"weights": "here"}),
        (ConfigError, r"weights=3: must be the name of a folder", {"weights": 3}),
        (ConfigError, r"weights='': must be the name of a folder", {"weights": ""}),
        (ConfigError, r"'ful' names no module .*did you mean 'full'\?.* Net has", {"recompute": "ful"}),
        (
            ConfigError,
            r"'elsewhere' names no module inside of a block\. Net has",
            {"recompute": "full/elsewhere", "segments": 2},
        ),
        (
            ConfigError,
            r'offload="boundaries" has no effect with recompute="none"',
            {"offload": "boundaries", "recompute": "none", "segments": 2},
        ),
        (ConfigError, r"max_grad_norm=0.0: must be positive", {"max_grad_norm": 0.0}),
        (ConfigError, r"autocast is a autocast object.*pass what makes it", {"autocast": torch.autocast("cpu")}),
        (ConfigError, r"optimizer is a SGD object.*pass what makes it", {"optimizer": SGD(Net().parameters())}),
    ],
)
def test_an_engine_that_cannot_be(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        engine(**settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"weights": "/nowhere"}, "/nowhere has neither"),
        ({"recompute": "layers.0"}, "'layers.0' names no module"),
    ],
    ids=["a folder that is not there", "a module around the blocks"],
)
def test_nothing_is_measured_for_what_cannot_be(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any, **__: Any) -> None:
        pytest.fail("layers are measured")

    monkeypatch.setattr(planner, "profile_of", measured)
    with torch.device("meta"):
        net = Net()
    with pytest.raises(Fold3dError, match=message):
        engine(net, memory_limit="1GB", segments=2, **settings)


@pytest.mark.parametrize("how", ["whole", "in place", "a block"])
def test_a_compiled_model_cannot_be_cut(how: str) -> None:
    """And nothing is compiled to find that out. Where nothing is cut it is none of fold3d's business."""
    net = Net()
    model: nn.Module = net
    if how == "whole":
        model = torch.compile(net)  # type: ignore[assignment]
    elif how == "in place":
        net.compile()
    else:
        net.layers[1] = torch.compile(net.layers[1])  # type: ignore[assignment]
    where = r"module 'layers\.1'" if how == "a block" else "the model"
    with pytest.raises(TraceError, match=rf"{where} is compiled \(torch\.compile\).*pass the model as it was before"):
        engine(model, segments=2, blocks="auto")


def test_a_batch_that_does_not_divide() -> None:
    one = engine(micro_batches=4)
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape \[6, 4\].* does not divide into micro_batches=4"):
        one.step(batch_of(6))
    with pytest.raises(ValueError, match=r"batch\['x'\] has shape \[0, 4\]"):
        one.step(batch_of(0))
    with pytest.raises(ValueError, match="at least one micro-batch"):
        one.run([], lambda model, batch: model(**batch))
    assert torch.isfinite(one.step(batch_of(8)).loss), "a refused batch leaves the engine as it was"


def test_a_closed_engine() -> None:
    one = engine()
    one.close()
    one.close()
    with pytest.raises(ConfigError, match="this engine is closed"):
        one.step(batch_of())


def test_step_without_optimizer() -> None:
    one = engine(optimizer=None)
    with pytest.raises(ConfigError, match="step needs an optimizer"):
        one.step(batch_of())
    assert torch.isfinite(one.evaluate(batch_of()))


def test_nothing_to_record_the_model_with() -> None:
    one = Engine(Net(), ParallelConfig(segments=2, blocks="layers"), optimizer=SGD)
    with pytest.raises(ConfigError, match="has not been recorded yet; pass example="):
        one.state_dict()


def test_the_state_of_another_model() -> None:
    state = engine().state_dict()
    other = engine(Net(blocks=5))
    with pytest.raises(CheckpointError, match=r"has no 'layers\.4\.weight'.*belongs to another model"):
        other.load_state_dict(state)


# Several ranks: the same answer on each


def _error(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except (Fold3dError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


def labels_missing(layout: dict[str, Any]) -> tuple[str, str]:
    """A HuggingFace model returns no loss without labels."""
    model = models.build(models.gpt2_config())
    one = Engine(model, ParallelConfig(**layout), optimizer=SGD)
    batch = data.batch(2, 8)
    del batch["labels"]
    return _error(lambda: one.step(batch))


def test_labels_missing(ranks: RankPool) -> None:
    for kind, text in ranks.run(labels_missing, 2, {"pp": 2, "comm_timeout": 10.0}):
        assert kind == "RankError" and text.startswith("rank 1 (replica 0, stage 1) failed in 1F0 of step 1"), text
        assert "without a loss" in text and "`labels`" in text, text


def loss_per_row(own_loop: bool) -> tuple[str, str]:
    one = engine(Net(per_row=True), pp=2)
    if own_loop:
        return _error(lambda: one.run([batch_of()], lambda model, batch: model(**batch)))
    return _error(lambda: one.step(batch_of()))


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_loss_that_is_no_number(ranks: RankPool, own_loop: bool) -> None:
    for kind, text in ranks.run(loss_per_row, 2, own_loop):
        assert kind == "RankError" and "rank 1 (replica 0, stage 1) failed in 1F0" in text, text
        assert "the loss has shape [4]: it must be one number" in text, text


def other_plan(layouts: list[dict[str, Any]]) -> tuple[str, str]:
    return _error(lambda: engine(**layouts[dist.get_rank()]))


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("difference", [{"micro_batches": 4}, {"seed": 1}, {"schedule": "gpipe"}, {"bucket_bytes": 8}])
def test_another_plan_on_one_rank(ranks: RankPool, difference: dict[str, Any]) -> None:
    common = {"dp": 2, "pp": 2, "micro_batches": 2, "schedule": "1f1b", "bucket_bytes": 16, "seed": 0}
    ((name, value),) = difference.items()
    for kind, text in ranks.run(other_plan, 4, [common, common, common | difference, common]):
        assert kind == "ConfigError" and f"ranks [2] have another {name} than rank 0: {value!r} on rank 2, and" in text
        assert f"and {common[name]!r} there" in text and "same script" in text


@pytest.mark.gate
def test_one_rank_cannot_build(ranks: RankPool) -> None:
    found = ranks.run(other_plan, 2, [{"pp": 2}, {"pp": 2, "blocks": "h"}])
    assert found[1][0] == "TraceError" and "blocks='h'" in found[1][1]
    assert found[0][0] == "RankError"
    assert "rank 1 (replica 0, stage 1) failed in building the engine: TraceError: blocks='h'" in found[0][1]


def an_index_that_is_none(folder: str) -> tuple[str, str]:
    """Rank 1's files are other than rank 0's."""
    own = Path(folder, str(dist.get_rank()))
    own.mkdir()
    weights = {name: value.contiguous() for name, value in Net().state_dict().items()}
    save_file(weights, own / "model.safetensors")
    if dist.get_rank() == 1:
        (own / "model.safetensors.index.json").write_text('["model.safetensors"]')
    with torch.device("meta"):
        net = Net()
    return _error(lambda: engine(net, pp=2, weights=own))


def test_files_that_one_rank_cannot_read(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(an_index_that_is_none, 2, str(tmp_path))
    assert found[1][0] == "CheckpointError" and "is no index of safetensors files" in found[1][1]
    assert found[0][0] == "RankError" and "rank 1 (replica 0, stage 1) failed in building the engine" in found[0][1]


def used_again() -> list[tuple[str, str]]:
    one = engine(pp=2)
    one.step(batch_of())
    bad: Mapping[str, Any] = {"x": torch.zeros(4, 5)}
    first = _error(lambda: one.step(dict(bad)))
    later = [_error(lambda: one.step(batch_of())), _error(lambda: one.evaluate(batch_of())), _error(one.state_dict)]
    one.close()
    fresh = engine(pp=2)
    fresh.step(batch_of())
    fresh.close()
    return [first, *later]


def cut_twice() -> list[tuple[str, str]]:
    model = Net()
    for layout in ({"pp": 2}, {"dp": 2}):
        answer = _error(lambda: engine(model, **layout).close())  # noqa: B023
        if answer[0]:
            return [answer]
    return []


def test_a_model_that_another_engine_has_cut(ranks: RankPool) -> None:
    """Weights that this rank gave away must not be drawn anew in silence."""
    for rank, (answer,) in enumerate(ranks.run(cut_twice, 2)):
        assert answer[0] == "ConfigError" and "the model was cut by another Engine" in answer[1], answer
        assert f"(layers.{2 - 2 * rank}.weight, ...)" in answer[1] and "build the model anew" in answer[1], answer


@pytest.mark.gate
def test_an_engine_that_has_failed_stays_so(ranks: RankPool) -> None:
    """But another engine in the same processes works."""
    for first, *later in ranks.run(used_again, 2):
        assert first[0] == "RankError" and "rank 0 (replica 0, stage 0) failed in 0F0 of step 2" in first[1], first
        for kind, text in later:
            assert kind == "RankError" and f"stopped at an earlier failure: {first[1]}" in text, text


def batches_differ(layout: dict[str, Any], starts: list[float], rows: list[int], evaluate: bool) -> tuple[str, str]:
    one = engine(**layout)
    rank = dist.get_rank()
    batch = batch_of(rows[rank], starts[rank])
    owned = list(one.owned.values())
    before = [parameter.detach().clone() for parameter in owned]
    answer = _error(lambda: one.evaluate(batch) if evaluate else one.step(batch))
    if answer[0] and one.topology.dp_rank == one.topology.dp - 1:  # the replica with the odd stage
        assert all(torch.equal(a, b) for a, b in zip(before, owned, strict=True)), "nothing was learnt"
    return answer


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("layout, odd", [({"pp": 2}, 1), ({"dp": 2, "pp": 2}, 3), ({"pp": 4, "micro_batches": 2}, 2)])
def test_another_batch_on_one_stage(ranks: RankPool, layout: dict[str, Any], odd: int, evaluate: bool) -> None:
    """Only one value differs: nothing in the messages between stages would show it."""
    world = layout.get("dp", 1) * layout["pp"]
    starts = [float(rank == odd) for rank in range(world)]
    for kind, text in ranks.run(batches_differ, world, layout, starts, [4] * world, evaluate):
        assert kind == "RankError" and "were given another batch than its stage 0" in text, text
        assert f"of replica {odd // layout['pp']}" in text and "engine.topology.dp_rank" in text, text


def test_batches_of_replicas_may_differ(ranks: RankPool) -> None:
    found = ranks.run(batches_differ, 4, {"dp": 2, "pp": 2}, [0.0, 0.0, 5.0, 5.0], [4, 4, 8, 8], False)
    assert found == [("", "")] * 4


def steps_of_different_length() -> tuple[str, str]:
    one = engine(pp=2, micro_batches=4, comm_timeout=4.0)
    count = 4 if dist.get_rank() == 0 else 3
    return _error(lambda: one.run([batch_of()] * count, lambda model, batch: model(**batch)))


def test_another_number_of_micro_batches_on_one_stage(ranks: RankPool) -> None:
    for kind, text in ranks.run(steps_of_different_length, 2):
        assert kind == "RankError" and "step 1" in text, text
        assert "was given 3 micro-batches and" in text or "was given 4 micro-batches and" in text, text
