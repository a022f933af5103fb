"""A call that every process must make, made by one alone, ends in time and says so."""

from __future__ import annotations

import time
from typing import Any

import pytest

import fold3d
from tests.helpers.ranks import RankPool
from tests.trainer.jobs import Job, stock_arguments, trainer_arguments

CALLS = {
    "trainer.save_model()": lambda trainer: trainer.save_model(),
    "trainer.evaluate()": lambda trainer: trainer.evaluate(),
    "trainer.predict()": lambda trainer: trainer.predict(trainer.eval_dataset),
    "engine.state_dict()": lambda trainer: trainer.engine.state_dict(),
}
LIMIT = 3.0


def on_rank_0(folder: str, call: str, other: str | None) -> tuple[str, float]:
    """Rank 0 makes `call`, rank 1 `other`; returns the error and how long it took."""
    job = Job(folder, arguments={"max_steps": 1})
    args = fold3d.TrainingArguments(**stock_arguments(job), pp=2, segments=1, comm_timeout=LIMIT)
    trainer = fold3d.Trainer(args=args, **trainer_arguments(job))
    trainer.train()
    mine = call if args.process_index == 0 else other
    start = time.monotonic()
    try:
        if mine is None:
            time.sleep(LIMIT + 3)
            trainer.engine.flush()
            trainer.engine.state_dict()
        else:
            CALLS[mine](trainer)
    except fold3d.RankError as error:
        chain = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return str(error) if chain is None else f"a chain of errors: {chain!r}", time.monotonic() - start
    finally:
        trainer.engine.close()
    return "no error", time.monotonic() - start


@pytest.mark.gate(cases=1)
@pytest.mark.parametrize("call", CALLS)
def test_by_one_process_alone(ranks: RankPool, tmp_path: Any, call: str) -> None:
    (text, seconds), (told, _) = ranks.run(on_rank_0, 2, str(tmp_path), call, None, timeout=60)
    assert f"every process must call {call}" in text and "rank 1" in text
    assert seconds < LIMIT + 5
    assert f"every process must call {call}" in told


def test_another_call(ranks: RankPool, tmp_path: Any) -> None:
    """At once."""
    call, other = "trainer.save_model()", "engine.state_dict()"
    for text, seconds in ranks.run(on_rank_0, 2, str(tmp_path), call, other, timeout=60):
        assert text == f"every process must call {call}, but rank 1 calls {other}"
        assert seconds < LIMIT


def test_by_all_of_them(ranks: RankPool, tmp_path: Any) -> None:
    for call in CALLS:
        assert [text for text, _ in ranks.run(on_rank_0, 2, str(tmp_path), call, call)] == ["no error", "no error"]
