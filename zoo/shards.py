"""judge_shards(): trains a tiny model of a class on two processes that share its weights, and compares it with one."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fold3d import Engine, ParallelConfig
from tests.helpers import call
from zoo.cases import Case
from zoo.double import InDouble
from zoo.places import configs_of
from zoo.verdict import (
    EXACT,
    TOLERANCE,
    UNBUILT,
    WRONG,
    Subject,
    Verdict,
    build,
    difference,
    loss_of,
    outcome_of,
    reason_of,
    remade,
    train,
    worst,
)

TP = 2
WAYS = ("none", "sub")
"""Of `tp_overlap`."""
CHANCE = 0.1
_DROPS = re.compile(r"(?<!layer)(?<!layer_)drop")
"""Dropout of numbers or of samples; whole layers that are left out are refused by name."""
_WAIT_S = 300.0
"""For the other process, which may be busy; a case has a limit of its own."""

Trained = tuple[Tensor, dict[str, Tensor]]


def judge_shards(case: Case) -> Verdict:
    """Returns the worst of the verdicts on the ways of `tp_overlap`, and in `more` that on them with dropout.

    What is compared with is the plain model, and with dropout fold3d's on one process: masks depend on its seed.
    """
    subject, why = build(case)
    if subject is None:
        return Verdict(UNBUILT, why)
    torch.set_default_dtype(subject.dtype)
    with tempfile.TemporaryDirectory() as folder, two_ranks(f"{folder}/of-") as pair:
        as_it_is = plain = _all_ways(subject, pair, _plainly)
        rounds = as_it_is.outcome == WRONG and subject.dtype == torch.float64
        with InDouble() if rounds else contextlib.nullcontext():  # as `compared` does
            if rounds:
                plain = _all_ways(subject, pair, _plainly)
            dropping = outcome_of(lambda: _with_dropout(subject, pair))
    if rounds and plain.outcome == EXACT:
        plain = replace(plain, reason=f"in double precision throughout; {as_it_is.reason}")
    return replace(plain, more=str(dropping))


@dataclass(frozen=True, slots=True)
class Pair:
    """This process and the other one, which do the same."""

    rank: int
    folder: str
    port: int

    @contextlib.contextmanager
    def connected(self, name: str) -> Iterator[None]:
        """Gives the body a process group of both; `name` is one of its own."""
        environment = call.rank_environment(self.rank, TP, self.port)
        group = call.process_group(self.folder + name, self.rank, TP, _WAIT_S)
        with call.changed_environment(environment), group:
            yield


@contextlib.contextmanager
def two_ranks(folder: str) -> Iterator[Pair]:
    """Runs the body in this process as rank 0, and in a copy of it, which ends there, as rank 1."""
    port = call.free_port()
    copied = os.fork()
    rank = int(copied == 0)
    try:
        if rank == 1:
            call.die_with_parent()
        yield Pair(rank, folder, port)
    finally:
        if rank == 1:
            os._exit(0)
        os.waitpid(copied, 0)


def _all_ways(subject: Subject, pair: Pair, alone: Callable[[Subject], Trained]) -> Verdict:
    """Args:
    alone: trains the subject on one process.
    """
    precision = torch.empty(0).float().dtype  # another one in double precision throughout

    def one_way(way: str, want: Trained) -> Verdict:
        with pair.connected(f"{alone.__name__}-{way}-{precision}"):
            off = difference(_by_engine(subject, tp=TP, tp_overlap=way), want, TOLERANCE[subject.dtype])
        return Verdict(WRONG if off else EXACT, off, subject.inputs)

    def all_ways() -> Verdict:
        want = alone(subject)
        found = {way: outcome_of(partial(one_way, way, want), subject.inputs) for way in WAYS}
        return found[WAYS[0]] if len(set(found.values())) == 1 else worst(found, subject.inputs)

    return outcome_of(all_ways, subject.inputs)


def _plainly(subject: Subject) -> Trained:
    return train(copy.deepcopy(subject.model), subject.batch)


def _by_engine(subject: Subject, **layout: Any) -> Trained:
    """Returns loss and gradients of the whole model, on each rank."""
    engine = Engine(copy.deepcopy(subject.model), ParallelConfig(**layout, comm_timeout=_WAIT_S))
    try:
        loss = engine.run([subject.batch], loss_of)
        with torch.no_grad():  # a state has whole weights; of the gradients that take their place it has the whole, too
            for one in engine.owned.values():
                one.copy_(torch.zeros_like(one) if one.grad is None else one.grad)
        whole = engine.state_dict()["model"]
        return loss, {name: whole[name] for name, _ in subject.model.named_parameters() if name in whole}
    finally:
        engine.close()


def _with_dropout(subject: Subject, pair: Pair) -> Verdict:
    try:
        dropping = _dropping(subject)
        losses = [float(train(copy.deepcopy(dropping.model), subject.batch, seed=seed)[0]) for seed in range(4)]
    except Exception as error:  # the class's own, which may take none
        return Verdict(UNBUILT, reason_of(error))
    if max(losses) - min(losses) <= TOLERANCE[subject.dtype]:
        return Verdict(UNBUILT, "no configuration of the class has a chance of dropout that counts")
    return _all_ways(dropping, pair, _by_engine)


def _dropping(subject: Subject) -> Subject:
    """Returns the subject with dropout wherever its configuration has a chance of it."""
    model: Any = subject.model
    config = copy.deepcopy(model.config)
    for one in configs_of(config):
        for name in filter(_DROPS.search, list(vars(one))):
            value = getattr(one, name)
            if type(value) is float:
                setattr(one, name, CHANCE)
            elif isinstance(value, (list, tuple)) and all(type(each) is float for each in value):
                setattr(one, name, type(value)([CHANCE] * len(value)))
    return remade(subject, config)
