"""The coat: what is put on modules is a row of one table, comes off to the entry, and copies are without it."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import fold3d
from fold3d import Engine, ParallelConfig
from fold3d._C import BlockForward
from fold3d.engine import engine as engine_module
from fold3d.stage import rank_model
from fold3d.trace.coat import Coat, Wrap, copy_without_coat, row_beneath, row_of
from tests.helpers import data, models
from tests.helpers.coats import look, rows_on

SOURCES = Path(fold3d.__file__).parent
PUTS = re.compile(r"\.forward = |\.register_(?!buffer|parameter|module)\w*(hook)\(")
ON_COPIES = {"trace", "profile", "splitting", "sharding"}
"""Components that look at copies of models, on which they put what they like."""
ELSEWHERE = {
    "data_parallel/optimizer/hooks.py": "an optimizer",
    "data_parallel/one_replica.py": "an optimizer",
    "tensor_parallel/vocabulary/chunked_loss.py": "a tensor that stands for logits",
    "trainer/evaluation.py": "an object that stands for an encoder",
}


def forwards(module: nn.Module) -> list[Wrap]:
    """Returns the rows of the forwards on a module, the outermost first."""
    found, own = [], vars(module).get("forward")
    while isinstance(own, BlockForward):
        found.append(row_of(own))
        own = own.__wrapped__.__wrapped__  # type: ignore[attr-defined]
    return found


def test_each_row_is_put_on_by_its_room_alone() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        if path.name != "coat.py":
            for name in re.findall(r"\bWrap\.([A-Z_]+)\b", path.read_text()):
                found.setdefault(name, set()).add(path.relative_to(SOURCES).parts[0])
    assert found == {row.name: {row.component} for row in Wrap}


def test_nobody_puts_anything_on_a_model_otherwise() -> None:
    found = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] not in ON_COPIES and PUTS.search(path.read_text())
    }
    assert found == set(ELSEWHERE)


def one() -> nn.Linear:
    """Returns a module."""
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def test_all_of_it_comes_off() -> None:
    module = one()
    weight, before = module.weight, look(module)
    with Coat() as coat:
        coat.put(Wrap.PART_ATTRIBUTES, module, {"out_features": 1})
        coat.put(Wrap.WEIGHT, module, {"weight": torch.zeros(2, 2), "more": 3})
        coat.put(Wrap.RECOMPUTED, module, lambda x: x)
        coat.put(Wrap.CHUNK, module, lambda x: x + 1)
        part = coat.enter_context(Coat())
        for row in (
            Wrap.SEED,
            Wrap.SEED_AFTER,
            Wrap.AFTER_HOOKS,
            Wrap.LENGTH,
            Wrap.READY,
            Wrap.STATE_REFUSED,
        ):
            part.put(row, module, lambda *_: None)
        coat.put(Wrap.GRADIENT, weight, lambda _: None)
        assert look(module) != before and module.out_features == 1 and vars(module)["more"] == 3
        assert forwards(module) == [Wrap.CHUNK, Wrap.RECOMPUTED]
        assert rows_on(module) >= {Wrap.SEED, Wrap.READY, Wrap.CHUNK, Wrap.RECOMPUTED}
        part.close()
        assert rows_on(module) == {Wrap.CHUNK, Wrap.RECOMPUTED}
    assert look(module) == before and not weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def test_an_error_half_way_leaves_nothing() -> None:
    module = one()
    before = look(module)
    with pytest.raises(KeyError), Coat() as coat:
        coat.put(Wrap.SEED, module, lambda *_: None)
        coat.put(Wrap.CHUNK, module, lambda x: x)
        raise KeyError
    assert look(module) == before


def test_a_row_never_comes_beneath_a_later_one() -> None:
    with Coat() as coat:
        module = one()
        coat.put(Wrap.CHUNK, module, lambda x: x)
        with pytest.raises(AssertionError):
            coat.put(Wrap.VOCABULARY, module, lambda x: x)
        coat.put(Wrap.RESTS, module, lambda x: x)


def test_what_others_put_around_it_since_stays() -> None:
    coat, module = Coat(), one()
    coat.put(Wrap.CHUNK, module, lambda x: x)
    assert row_beneath(module) is None
    theirs = functools.wraps(module.forward)(lambda x: x)
    module.forward = theirs
    assert row_beneath(module) is Wrap.CHUNK
    coat.close()
    assert module.forward is theirs


def test_signatures_are_those_of_the_model() -> None:
    module = one()
    with Coat() as coat:
        coat.put(Wrap.CHUNK, module, lambda *args, **kwargs: None)
        coat.put(Wrap.RESTS, module, lambda *args, **kwargs: None)
        assert list(inspect.signature(module.forward).parameters) == ["input"]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_without_it(how: Callable[[nn.Module], nn.Module]) -> None:
    module, x = one(), torch.ones(1, 2)
    want = module(x)
    called = list[str]()
    with Coat() as coat:
        for row in (Wrap.VOCABULARY, Wrap.CHUNK):
            coat.put(row, module, lambda x: called.append("forward") or x)
        for row in (Wrap.SEED, Wrap.SEED_AFTER, Wrap.READY, Wrap.LENGTH):
            coat.put(row, module, lambda *_: called.append("hook"))
        copied = how(module)
        assert not called and torch.equal(copied(x), want)
        copied.load_state_dict(copied.state_dict())
        assert not called
        assert b"fold3d" not in pickle.dumps(module), "who reads it may not have fold3d"
        bare = copy_without_coat(copied, {})
        assert "forward" not in vars(bare)
    if how is copy.deepcopy:
        assert not bare._forward_pre_hooks and not bare._forward_hooks


def test_a_forward_around_the_one_before_is_that_of_the_copy() -> None:
    """As TRL puts one on models, which calls what was there before: a recording ran the original's modules."""
    module, x = one(), torch.ones(1, 2)
    before = module.forward

    def twice(self: nn.Module, *args: Any, **named: Any) -> Any:
        return before(*args, **named) * 2

    module.forward = MethodType(twice, module)  # type: ignore[method-assign]
    want = module(x)
    copied = copy_without_coat(module, {})
    assert torch.equal(copied(x), want)
    for parameter in copied.parameters():
        parameter.data.zero_()
    assert not copied(x).any() and torch.equal(module(x), want)


LAYOUTS: list[dict[str, Any]] = [
    {"segments": 2},
    {"segments": 4, "recompute": True},
    {"segments": 1, "recompute": "attn,mlp"},
    {"segments": 2, "chunked_loss": 8},
]


def engine_on(model: nn.Module, layout: dict[str, Any]) -> Engine:
    """Returns an engine that has trained a step."""
    engine = Engine(model, ParallelConfig(micro_batches=2, **layout), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    engine.step(data.batch(4, 8))
    return engine


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_engine_on_one_process(layout: dict[str, Any]) -> None:
    model = models.build(models.gpt2_config(), dtype=torch.float64)
    batch = data.batch(2, 8)
    model(**batch)
    before = look(model)
    engine = engine_on(model, layout)
    assert (
        rows_on(model) - {Wrap.ENDS, Wrap.SEED, Wrap.SEED_AFTER, Wrap.RECOMPUTED, Wrap.CHUNK, Wrap.CHUNKED_LOSS}
        == set()
    )
    want = model(**batch).loss
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not rows_on(copied)
        # transformers computes the loss in float32, in chunks in another order
        torch.testing.assert_close(copied(**batch).loss, want, rtol=0, atol=1e-6 if "chunked_loss" in layout else 0)
    assert b"fold3d" not in pickle.dumps(model)
    engine.close()
    assert look(model) == before


@pytest.mark.parametrize("layout", [{"segments": 2}, {"segments": 1, "recompute": True}], ids=str)
def test_torch_compile_of_a_model_with_an_engine(layout: dict[str, Any]) -> None:
    model = models.build(models.gpt2_config(), dtype=torch.float64)
    engine, batch = engine_on(model, layout), data.batch(2, 8)
    want = model(**batch).loss
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**batch).loss, want, rtol=0, atol=1e-12)
    engine.close()
    torch.testing.assert_close(compiled(**batch).loss, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("place, name", [(rank_model, "recompute_modules"), (engine_module, "connect")])
def test_an_engine_that_fails_half_way_leaves_nothing(place: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("half-way")

    model = models.build(models.gpt2_config(), dtype=torch.float64)
    model(**data.batch(2, 8))
    before = look(model)
    monkeypatch.setattr(place, name, fail)
    with pytest.raises(KeyError, match="half-way"):
        engine_on(model, {"segments": 2, "chunked_loss": 8})
    assert look(model) == before
