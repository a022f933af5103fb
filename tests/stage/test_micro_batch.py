"""Micro-batches as values: the Executor hands each to its forwards and gives back what the last chunk returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fold3d import _C
from fold3d import schedule as schedules
from fold3d.comms.groups import QUEUES
from fold3d.stage.micro_batch import loss_run, one_number

NOBODY = dict.fromkeys(QUEUES, "")


class Chunk:
    """Hands on what its micro-batch says."""

    def __init__(self, executor: list[_C.Executor], is_last: bool) -> None:
        self._executor, self._is_last = executor, is_last
        self.seen: list[Any] = []

    def forward(self, micro_batch: Any, received: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        self.seen.append(micro_batch)
        if micro_batch == "closes":
            self._executor[0].close()
        if micro_batch == "raises":
            raise ZeroDivisionError("asked for")
        return ([], {"of": micro_batch}) if self._is_last else ([torch.ones(1)], None)

    def reduce(self) -> None:
        raise AssertionError("one replica")


def executor_of(chunks: int) -> tuple[_C.Executor, list[Chunk]]:
    box: list[_C.Executor] = []
    made = [Chunk(box, v == chunks - 1) for v in range(chunks)]
    box.append(_C.Executor(made, 0, 1, NOBODY, torch.device("cpu"), 30.0, "rank 0"))
    return box[0], made


def order(segments: int, micro_batches: int) -> Any:
    return schedules.lower(schedules.forward_only(1, segments, micro_batches), reduce=False)


def test_every_chunk_is_handed_the_values_and_results_come_back_in_order() -> None:
    executor, chunks = executor_of(2)
    values = [object(), "b", 3]
    assert executor.run(order(2, 3), 0, False, values) == [{"of": value} for value in values]
    assert all({id(one) for one in chunk.seen} == {id(one) for one in values} for chunk in chunks)
    executor.close()


def test_nothing_of_a_run_is_kept() -> None:
    executor, _ = executor_of(1)
    with pytest.raises(ZeroDivisionError, match="asked for"):
        executor.run(order(1, 2), 0, False, ["a", "raises"])
    assert executor.run(order(1, 1), 0, False, ["c"]) == [{"of": "c"}]
    with pytest.raises(IndexError):
        executor.run(order(1, 2), 0, False, ["too few"])
    assert executor.run(order(1, 1), 0, False, ["d"]) == [{"of": "d"}]
    executor.close()


def test_a_chunk_may_close_the_executor_that_runs_it() -> None:
    executor, _ = executor_of(1)
    assert executor.run(order(1, 2), 0, False, ["closes", "b"]) == [{"of": "closes"}, {"of": "b"}]
    with pytest.raises(RuntimeError, match="the executor is closed"):
        executor.run(order(1, 1), 0, False, ["c"])


def test_a_loss_function_that_takes_labels_out_of_its_inputs() -> None:
    """A micro-batch keeps them."""
    inputs = {"x": 1, "labels": 2}
    loss = loss_run(lambda _, inputs: inputs.pop("labels"), nn.Identity(), inputs)
    loss.begin(nn.Identity(), [""], torch.device("cpu"), None)
    assert loss.is_over and loss.end(None) == 2 and inputs == {"x": 1, "labels": 2}


@pytest.mark.parametrize(
    "value, error, message",
    [
        (3.0, TypeError, "the loss is a float"),
        (torch.ones(2, requires_grad=True), TypeError, r"shape \[2\]"),
        (torch.ones((), device="meta"), ValueError, "meta device"),
        (torch.ones(()), ValueError, "no gradient"),
    ],
)
def test_what_is_no_loss(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        one_number(value)
    one_number(torch.ones((), requires_grad=True))
