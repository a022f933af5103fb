"""The coat over ranks: all that an engine puts on a model is rows of the table, and goes with the engine."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from fold3d import Engine, MissingWeightsError, ParallelConfig
from fold3d.trace.coat import Wrap
from tests.helpers import data, models
from tests.helpers.coats import look, rows_on
from tests.helpers.ranks import RankPool

CONFIGS = {"gpt2": models.gpt2_config, "llama": models.llama_config}
REFUSALS = frozenset({Wrap.STATE_REFUSED, Wrap.CALL_REFUSED})
"""They go with the parts of weights, not with the engine."""


def worn(family: str, layout: dict[str, Any]) -> tuple[set[str], list[str], float]:
    """Trains, looks at what is on the model, copies it, and closes the engine, after which the model is as before.

    Returns: the rows, what copying says, and by how much results of copies differ.
    """
    model = models.build(CONFIGS[family](), dtype=torch.float64)
    batch = data.batch(4, 8)
    model(**batch)
    before = look(model)
    config = ParallelConfig(micro_batches=2, **layout)
    engine = Engine(model, config, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    engine.step(batch)
    engine.evaluate(batch)
    engine.flush()
    rows, said, differs = {row.name for row in rows_on(model)}, [], 0.0
    for how in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        try:
            copied = how(model)
        except MissingWeightsError as error:
            said.append(str(error))
            continue
        assert not rows_on(copied)
        differs = max(differs, abs(float(copied(**batch).loss - model(**batch).loss)))
    engine.close()
    assert look(model, stays=REFUSALS) == before
    assert rows_on(model) <= REFUSALS
    return rows, said, differs


@pytest.mark.gate(cases=2)
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_of_parts(ranks: RankPool, family: str, sequence: bool) -> None:
    layout = {"tp": 2, "pp": 2, "segments": 1, "sequence_parallel": sequence}
    for rows, said, _ in ranks.run(worn, 4, family, layout, timeout=150.0):
        assert rows >= {"REGION", "DIVIDED", "WHOLE", "VOCABULARY", "CHUNK", "STATE_REFUSED"}
        assert sequence == ("GATHERED" in rows) and "CALL_REFUSED" not in rows
        assert len(said) == 2 and all("engine.state_dict()" in text for text in said)


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("family", CONFIGS)
def test_of_replicas(ranks: RankPool, family: str) -> None:
    layout = {"dp": 2, "segments": 2, "recompute": "blocks", "chunked_loss": 8}
    for rows, said, differs in ranks.run(worn, 2, family, layout):
        assert rows == {"CHUNK", "CHUNKED_LOSS", "READY"}
        assert not said and differs < 1e-6  # a loss in float32, in chunks in another order
