"""judge(): trains a tiny model of a class, whole and cut into four parts, and compares loss and gradients."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from fold3d.errors import Fold3dError, RankError
from fold3d.placement.partition import split_ranges
from fold3d.trace import trace
from fold3d.trace.arguments import Arguments, loss_in
from tests.trace.chains import FIRST_SEED, chained, ranks_of
from zoo.bytes_sent import NOTHING, BytesSent, bytes_sent
from zoo.cases import Case
from zoo.configs import SIZES, Size, tiny_config
from zoo.double import InDouble
from zoo.inputs import Batch, batches, labelled

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""float32 is for what torch has in no float64, such as grouped matrix products."""
PP, SEGMENTS = 2, 2
_MOST_PARAMETERS = 20_000_000
_SEEDS = (0, 1, 2, 3)
"""With which a loss must be the same: what is dropped seldom may be kept by chance."""
_LONGEST_SEARCH = 30.0
"""Seconds of CPU time after which no further size is tried."""

EXACT, REFUSED, WRONG, CRASHED, UNBUILT = "exact", "refused", "wrong", "crashed", "not built"
_ORDER = (EXACT, UNBUILT, REFUSED, CRASHED, WRONG)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a case."""

    outcome: str
    """One of EXACT, REFUSED (by fold3d, with a reason), WRONG (another loss or gradient, and no error), CRASHED (an
    error that is not fold3d's) and UNBUILT (no tiny model of the class runs by itself here)."""
    reason: str = ""
    inputs: str = ""
    """What the model was trained on, such as "text and images"."""
    sent: BytesSent = field(default=NOTHING, compare=False)
    """What crossed the borders between the four parts."""
    more: str = field(default="", compare=False)
    """What came of it beside that: of outputs that the model was asked for, or that a loss of the user's own read, see
    `judge_outputs`; of `judge_shards` what came of dropout."""

    def __str__(self) -> str:
        return f"{self.outcome}: {shorten(self.reason, 300, placeholder=' ...')}".removesuffix(": ")


@dataclass(frozen=True, slots=True)
class Subject:
    """A tiny model that trains, and on what."""

    model: nn.Module
    batch: Batch
    inputs: str

    @property
    def dtype(self) -> torch.dtype:
        """That it trains in."""
        return next(self.model.parameters()).dtype


Loss = Callable[[nn.Module, Batch], Tensor]


def judge(case: Case) -> Verdict:
    """Returns the verdict of a case."""
    subject, why = build(case)
    if subject is None:
        return Verdict(UNBUILT, why)
    return outcome_of(partial(compared, subject, weigh=True), subject.inputs)


def outcome_of(judged: Callable[[], Verdict], inputs: str = "") -> Verdict:
    """Returns what `judged` returns, or the verdict on what it raised."""
    try:
        return judged()
    except RankError as error:  # another rank's error, not fold3d's word on the model
        return Verdict(CRASHED, reason_of(error), inputs)
    except Fold3dError as error:
        return Verdict(REFUSED, reason_of(error), inputs)
    except Exception as error:
        return Verdict(CRASHED, reason_of(error), inputs)


def worst(found: Mapping[str, Verdict], inputs: str) -> Verdict:
    """Returns the worst of the verdicts on several ways to train a class, and a reason that names those that are not
    exact."""
    outcome = max((one.outcome for one in found.values()), key=_ORDER.index)
    reasons = {how: f"{one.outcome} {one.reason}" for how, one in found.items() if one.outcome != EXACT}
    return Verdict(outcome, "; ".join(f"{how}: {one}" for how, one in reasons.items()), inputs)


def reason_of(error: BaseException) -> str:
    """Returns the error's kind and first words, without the sizes of the example, on one line."""
    text = re.sub(r"its forward failed on the example \{.*?\} with", "its forward failed with", str(error), flags=re.S)
    text = re.sub(r"\s+", " ", text).strip()
    return f"{type(error).__name__}: {shorten(text, 200, placeholder=' ...')}"


def build(case: Case) -> tuple[Subject | None, str]:
    """Returns a tiny model of the class that trains by itself, in float64 if it can, and why there is none."""
    reasons: list[str] = []
    begun = time.process_time()
    with_text: Subject | None = None
    for size in SIZES:
        for dtype in (torch.float64, torch.float32):
            if time.process_time() - begun > _LONGEST_SEARCH:
                return with_text, "" if with_text is not None else reasons[0]
            torch.set_default_dtype(dtype)
            subject, reason = _build(case, size, dtype)
            if subject is not None and (subject.inputs != "text" or len(list(batches(subject.model))) == 1):
                return subject, ""
            with_text = with_text or subject  # another size may be right for its images, too
            reasons.append(reason)
    return with_text, "" if with_text is not None else reasons[0]


def _build(case: Case, size: Size, dtype: torch.dtype) -> tuple[Subject | None, str]:
    try:
        model_class = case.model_class()
        if model_class.forward is nn.Module.forward:
            return None, "it has no forward: its parts are trained one by one, and only generate() runs them together"
        model = _model(model_class, tiny_config(model_class.config_class, size, causal=case.kind == "causal"), dtype)
    except Exception as error:
        return None, reason_of(error)
    reason = ""
    for inputs, make in batches(model):
        try:
            plain = {name: _cast(value, dtype) for name, value in make().items()}
        except Exception as error:
            reason = reason or reason_of(error)
            continue
        for batch in labelled(model, plain):
            try:
                one, *others = (train(copy.deepcopy(model), batch, seed=seed)[0] for seed in _SEEDS)
                if any(abs(float(one - other)) > TOLERANCE[dtype] for other in others):
                    raise ValueError("the loss depends on numbers that are drawn at random")
            except Exception as error:
                reason = reason or reason_of(error)
                continue
            return Subject(model, batch, inputs), ""
    return None, reason or "no inputs of a kind that the rules make"


def remade(subject: Subject, config: Any) -> Subject:
    """Returns the subject with a like model of another configuration, and the same weights."""
    made = type(subject.model)(config).to(subject.dtype).train()
    made.load_state_dict(subject.model.state_dict())
    return replace(subject, model=made)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def _model(model_class: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    config.use_cache = False
    with torch.device("meta"):
        count = sum(one.numel() for one in model_class(copy.deepcopy(config)).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters where widths are as the class has them")
    torch.manual_seed(0)
    model: nn.Module = model_class(config).to(dtype).train()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():  # else what begins with zeros hides what is behind it
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the model's own loss; where it has none, a sum over the first tensor of its output that has gradients."""
    output = model(**batch)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    values = output.values() if hasattr(output, "values") else output
    for value in _flat(values):
        if value.requires_grad and value.dtype.is_floating_point:
            weights = torch.linspace(-1.0, 1.0, value.numel(), dtype=value.dtype).reshape(value.shape)
            return (weights * value.tanh()).sum()
    raise ValueError(f"{type(model).__name__} returned nothing that has a gradient")


def _flat(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _flat(value)


def train(model: nn.Module, batch: Batch, call: Loss = loss_of, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns loss and gradients of the whole model. Raises: ValueError for such as say nothing."""
    torch.manual_seed(seed)
    loss = call(model, batch)
    if not loss.isfinite():
        raise ValueError(f"the loss is {float(loss)}")
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    if not gradients or not any(bool(one.any()) for one in gradients.values()):
        raise ValueError("the loss moves no parameter")
    bad = next((name for name, one in gradients.items() if not one.isfinite().all()), None)
    if bad is not None:
        raise ValueError(f"the gradient of {bad} is not finite")
    return loss.detach(), gradients


def compared(subject: Subject, call: Loss = loss_of, asked: Batch | None = None, *, weigh: bool = False) -> Verdict:
    """Returns the verdict on a model that is recorded with the subject's batch and then trains on the one `asked`.

    Args:
        weigh: finds out how many bytes cross, as well; of a batch of the recorded form only.
    """
    found = _as_it_is(subject, call, asked, weigh)
    if found.outcome != WRONG or subject.dtype != torch.float64:
        return found
    with InDouble():
        again = _as_it_is(subject, call, asked, weigh)
    return replace(again, reason=f"in double precision throughout; {found.reason}") if again.outcome == EXACT else found


def _as_it_is(subject: Subject, call: Loss, asked: Batch | None, weigh: bool) -> Verdict:
    model, batch = subject.model, subject.batch if asked is None else asked
    with torch.no_grad():
        has_loss = loss_in(model(**subject.batch)) is not None  # training with the stock Trainer reads nothing else
    only_loss = has_loss and call is loss_of
    recorded = trace(model, example=Arguments.of("", subject.batch).reading(only_loss))
    parts = min(PP * SEGMENTS, max(PP, recorded.borders[1:].count("") + 1))
    ranges = split_ranges(recorded, parts)
    ranks = ranks_of(model, recorded, ranges, PP)
    crossed: list[list[Tensor]] = []
    got = chained(ranks, recorded, len(ranges), batch, call=call, only_loss=only_loss, sent=crossed)
    # What the model draws before its blocks, such as an order of patches, is the first chunk's; a loss may see it.
    want = train(copy.deepcopy(model), batch, call, seed=FIRST_SEED)
    off = difference(got, want, TOLERANCE[subject.dtype])
    if off:
        return Verdict(WRONG, off, subject.inputs)

    def again(chunk: int, received: list[Tensor]) -> tuple[list[Tensor], Any]:
        rank = ranks[chunk % PP]
        torch.manual_seed(0)
        return rank.run(chunk, lambda: call(rank._model, batch), received, None, only_loss=only_loss)

    sent = bytes_sent(recorded, ranges, crossed, again) if weigh else NOTHING
    fewer = "" if parts == PP * SEGMENTS else f"in {parts} parts, it has no more blocks"
    return Verdict(EXACT, fewer, subject.inputs, sent)


def difference(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]], tolerance: float) -> str:
    """Returns what differs by more than the tolerance, an empty string if nothing does."""
    off = abs(float(got[0] - want[0])) / max(1.0, abs(float(want[0])))
    if not off <= tolerance:
        return f"loss off by {off:.1e}"
    scale = max(1.0, *(float(one.abs().max()) for one in want[1].values() if one.numel()))
    for name in sorted(got[1].keys() | want[1].keys()):
        one, other = got[1].get(name), want[1].get(name)
        if one is None or other is None:
            rest = other if one is None else one
            if rest is not None and bool(rest.any()):
                return f"{'no gradient' if one is None else 'a gradient too many'} of {name}"
            continue
        off = float((one - other).abs().max()) / scale if one.numel() else 0.0
        if not off <= tolerance:
            return f"gradient of {name} off by {off:.1e}"
    return ""
