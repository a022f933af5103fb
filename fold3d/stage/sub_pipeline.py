"""SubPipeline: runs a chunk's blocks on a micro-batch in parts, one of which communicates while another computes."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fold3d import seeding
from fold3d.device import device_of, library_rng_state, same_library_rng_state, set_library_rng_state
from fold3d.sharding.shard import even_part
from fold3d.stage.call_guard import Settings
from fold3d.stage.loss_run import LossRun, ModelCall
from fold3d.stage.micro_batch import MicroBatch
from fold3d.stage.replay import ModelValues, uniform_weights_filled
from fold3d.stage.split_model import SplitModel
from fold3d.stage.users_state import SharedValues, names_one_of, users_code
from fold3d.tensor_parallel.group import TensorParallelGroup
from fold3d.tensor_parallel.operators import ways
from fold3d.tensor_parallel.random_draws import BEGINS_TO_DRAW, Chances, PerSampleRandom, RedrawError, Together
from fold3d.trace.arguments import Form, by_name, form_of
from fold3d.trace.batches import IGNORED, follows, part_of, samples_of
from fold3d.trace.wrappers import is_users as is_users_hook

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
_OF_16_BITS = 1e-3
_WIDER = 4.0
"""By what factor samples of a micro-batch differ more than those that were compared, to be compared, too."""
_RARE = 16
"""From which micro-batch on of one form those are compared again whose number is a power of two."""


@dataclass(frozen=True, slots=True)
class SubMicroBatch:
    """Some consecutive samples of a micro-batch."""

    inputs: dict[str, Any]
    """By argument name."""
    first: int
    end: int
    samples: int
    """Of the whole micro-batch."""


def sub_micro_batches(whole: Mapping[str, Any], most: int = 2) -> list[SubMicroBatch]:
    """Returns a micro-batch in parts, the first ones with a sample more where they are not equal; one part where nobody
    knows how to divide it.

    Args:
        most: parts, where there are as many samples.
    """
    samples = samples_of(whole) if most > 1 else None
    if samples is None:
        return [SubMicroBatch(dict(whole), 0, 1, 1)]
    parts = [even_part(samples, min(most, samples), number) for number in range(min(most, samples))]
    return [SubMicroBatch(part_of(whole, *part, samples), *part, samples) for part in parts]


def tolerance(dtype: torch.dtype) -> float:
    """Returns by which part of the largest value results of parts may differ from the whole's, of layers that compute
    in `dtype`: sums have another order."""
    return _TOLERANCE.get(dtype, _OF_16_BITS)


def divide(tensor: Tensor, parts: Sequence[SubMicroBatch]) -> Sequence[Tensor]:
    """Returns a tensor's parts for the sub-micro-batches; all of it for each where it does not follow the samples."""
    samples = parts[0].samples
    if not follows(tensor, samples):
        return [tensor] * len(parts)
    each = tensor.shape[0] // samples
    return torch.split(tensor, [each * (part.end - part.first) for part in parts])


def weights(parts: Sequence[SubMicroBatch], reduction: str, *, first: int = 0) -> list[float]:
    """Returns by which the parts' losses are multiplied before they are added.

    Args:
        first: from which position of a row on labels count.
        reduction: what the loss is of its samples: "sum", the "mean" over them, or over labels ("tokens"); a part
            without labels then counts 0, and its loss, which is no number, must not be added.
    """
    if reduction == "sum":
        return [1.0] * len(parts)
    counts = [
        part.end - part.first if reduction == "mean" else _count(part.inputs.get("labels"), first) for part in parts
    ]
    return [count / max(sum(counts), 1) for count in counts]


def _count(labels: object, first: int) -> int:
    """Returns how many labels are no padding."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < first:
        return 0
    return int((labels[..., first:] if first else labels).ne(IGNORED).sum())


class GradientsOfParts:
    """Why gradients of parts may not add up although what a model computes does, as far as one can know of that.

    Of a model; what its code has in it is looked for once, hooks again when any have been registered since.
    """

    def __init__(self, model: nn.Module, *, of_weights: bool = False) -> None:
        """Args:
        of_weights: weights get gradients of parts, too, one after the other.
        """
        self._model, self._of_weights = model, of_weights
        self._hooks_ever: int | None = None
        self._hooked, self._code = "", _why_of_code(model)

    def why_not(self) -> str:
        """Returns the reason; "" where nobody knows of one."""
        if self._hooks_ever != RemovableHandle.next_id:  # counts all hooks that were ever registered
            self._hooks_ever, self._hooked = RemovableHandle.next_id, _why_of_hooks(self._model)
            if self._of_weights:
                self._hooked = self._hooked or _why_of_weights(self._model)
        return self._code or self._hooked


def _why_of_hooks(model: nn.Module) -> str:
    for name, one in model.named_modules():
        if any(map(is_users_hook, (*one._backward_pre_hooks.values(), *one._backward_hooks.values()))):
            return f"{name or 'the model'} has a backward hook, which would be given gradients of a part"
    return ""


def _why_of_weights(model: nn.Module) -> str:
    for name, one in model.named_parameters():
        hooks = (*(one._backward_hooks or {}).values(), *(one._post_accumulate_grad_hooks or {}).values())
        if any(map(is_users_hook, hooks)):
            return f"{name} has a hook of its gradient, which would be given gradients of a part"
    return ""


def _why_of_code(model: nn.Module) -> str:
    for name, one in model.named_modules():
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.scale_grad_by_freq:
            return f"{name} has scale_grad_by_freq, which counts how often a token comes in the whole micro-batch"
    code = list(users_code(model))
    functions = [one.__name__ for one in code if isinstance(one, type) and issubclass(one, Function)]
    if functions:
        return f"its code has a backward of its own ({functions[0]}), which may tell a part from the whole"
    if names_one_of(_HOOKS, code):
        return "its code has hooks of gradients (register_hook), which would be given those of a part"
    return ""


_HOOKS = frozenset(("register_hook", "register_multi_grad_hook"))


logger = logging.getLogger(__name__)

Result = tuple[list[Tensor], Any]
"""The tensors for the next chunk, and what the model's forward returned as the last chunk."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """A call of the model in parts."""

    form: Form
    """Of calls that are divided alike."""
    parts: list[SubMicroBatch]
    whole: Mapping[str, Any]
    """By argument name."""


class Comparisons:
    """When what was found of parts of a micro-batch is looked at again: it may hang on sizes (room for so many tokens),
    on what samples have in common at first (all of one length), weights (what is rare at first), hooks, and attributes
    (a factor that a callback sets), and none is the same for long."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._settings = model, Settings(model, ())
        self._values, self._hooks = self._settings.now(), _hooks_of(model)
        self._largest: dict[Form, int] = {}
        self._spreads: dict[Form, dict[str, float]] = {}
        self._counts: Counter[Form] = Counter()

    @contextlib.contextmanager
    def forwards(self) -> Iterator[None]:
        """Around forwards that are compared: attributes that these change, counters, are not looked at."""
        before = self._settings.now()
        yield
        self._settings.ignore(before, self._settings.now())

    def note(self, form: Form, arguments: Mapping[str, Any]) -> bool:
        """A micro-batch has come; returns whether to compare with it: with the first of its form, with any of more
        elements than all before, or whose samples differ more, behind changes of attributes and hooks, and ever more
        rarely with others."""
        then, self._values = self._values, self._settings.now()
        hooked, self._hooks = self._hooks, _hooks_of(self._model)
        changed = self._settings.left(then) != self._settings.left(self._values)
        if changed:
            self._settings.count(then, self._values)
        if changed or hooked != self._hooks:
            self._largest.clear()
        size = sum(leaf.numel() for leaf in tree_leaves(dict(arguments)) if isinstance(leaf, Tensor))
        self._counts[form] += 1
        count, before = self._counts[form], self._largest.get(form, -1)
        self._largest[form] = max(size, before)
        # Those of a device would have to be waited for.
        spread = _spreads(arguments, most_often=count < _RARE)
        known = self._spreads.setdefault(form, spread)
        wider = [name for name, value in spread.items() if value > _WIDER * known.get(name, 0.0)]
        known.update({name: spread[name] for name in wider})
        return size > before or bool(wider) or (count >= _RARE and not count & (count - 1))


def _hooks_of(model: nn.Module) -> int:
    """Returns what is another number where a module of the model has other hooks around its forward."""
    return sum(sum(one._forward_hooks) + sum(one._forward_pre_hooks) for one in model.modules())


def _spreads(arguments: Mapping[str, Any], *, most_often: bool) -> dict[str, float]:
    """Returns by name how much the samples of an argument differ, in the sums and in the largest of their elements.

    Args:
        most_often: also of those on a device.
    """
    found: dict[str, float] = {}
    samples = samples_of(arguments)
    if samples is None:
        return found
    with torch._C.DisableTorchFunctionSubclass():  # a number that knows whether it is used is not
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or not follows(value, samples) or value.dtype.is_complex:
                continue
            if value.device.type == "cpu" or most_often:
                each = value.detach().reshape(samples, -1).double()
                if each.shape[1]:
                    found[name] = max(float(of.max() - of.min()) for of in (each.sum(1), each.amax(1)))
    return found


class SubPipeline:
    """Of one chunk. Its results are those of the whole micro-batch, to floating-point reordering.

    The blocks run on parts of the micro-batch. Behind the last block the parts are joined, and what lies there, the
    head, runs once on the whole, like the loss function: no loss is ever divided. Whether the blocks may run on parts
    is checked with the first micro-batch of each form, with others as `Comparisons` says, and with each
    whose parts take different ways through the blocks; these also run whole, without a backward: where a sample's
    values depend on others, micro-batches of this chunk stay whole, which is said once. The first of a form is compared
    with other weights, too (`uniform_weights_filled`). Masks of dropout are those of the whole micro-batch
    (`PerSampleRandom`).

    All ranks of a tensor-parallel group compute the same results, to the bit, so they decide alike.

    Two parts hide what regions end with. Where the sequence is shared, one exchange follows right behind another (what
    a region ends with is scattered, and, behind a norm, gathered again), and both are hidden by three parts, of which
    the second one begins a turn later: of any two that follow each other, one then computes a region and the other a
    norm.
    """

    def __init__(
        self,
        index: int,
        model: nn.Module,
        split: Callable[[], SplitModel],
        group: TensorParallelGroup,
        *,
        shares_sequence: bool = False,
    ) -> None:
        """Args:
        split: returns what runs the blocks of the chunk apart from the head; asked when that is needed.
        shares_sequence: whether regions begin with an exchange, too.
        """
        self._most = 3 if shares_sequence else 2
        self._index, self._model, self._make, self._group = index, model, split, group
        self._split: SplitModel | None = None
        self._joined: dict[Form, list[bool]] = {}
        """By form, per tensor behind the blocks: one part after the other; else all parts have the same."""
        self._comparisons = Comparisons(model)
        self._chances = Chances(model)
        self._draws: dict[Form, tuple[tuple[Any, ...], bool]] = {}
        """By form: with these chances, whether anything was drawn."""
        self._together: dict[Form, Together] = {}
        self._generators = seeding.generators_of(device_of(model))
        self._dropouts = [module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
        self._gradients = GradientsOfParts(model)
        self.reason = ""
        """Why micro-batches stay whole; empty where they do not."""

    def run(self, micro_batch: MicroBatch, received: Sequence[Tensor], *, again: bool = False) -> Result | None:
        """Returns what the whole micro-batch would give, for one backward over it; None where it has to run whole.

        Args:
            again: it ran in parts before, and does so once more.
        """
        if not again and not self.reason and (reason := self._gradients.why_not()):
            self._keep_whole(reason)
        if not again and (self.reason or not micro_batch.trains):
            return None
        found = self._divided(micro_batch.loss.call)
        if found is None:
            return None
        if self._split is None:
            self._split = self._make()
        split = self._split
        if reason := "" if again else split.why_not_in_parts(self._index, micro_batch.loss):
            self._keep_whole(reason)
            return None
        found = replace(found, form=(*found.form, split.way(micro_batch.loss)))
        with split.alone():
            joined = self._run(micro_batch, found, received, again=again)
            if joined is None or not split.is_last(self._index):
                return None if joined is None else (joined, None)
            return split.head(micro_batch.loss, joined, micro_batch.key)

    def explain(self, loss: LossRun, result: Any) -> None:
        """Raises SplitError where a loss is NaN because the head, run apart, has read what the blocks have computed."""
        if self._split is not None:
            self._split.explain(loss, result, head=True)

    def _run(
        self, micro_batch: MicroBatch, found: _Parts, received: Sequence[Tensor], *, again: bool
    ) -> list[Tensor] | None:
        """Returns what is behind the blocks, joined; None where the micro-batch stays whole."""
        is_new = found.form not in self._joined
        is_due = (not again and self._comparisons.note(found.form, found.whole)) or is_new
        expected = self._run_whole(micro_batch, found, received) if is_due else None
        if self.reason:
            return None
        try:
            if is_new and not self._holds_of_other_weights(micro_batch, found, received):
                return None
            results, are_alike = self._run_parts(micro_batch, found, received, again=again)
        except RedrawError as error:
            self._keep_whole(str(error))
            return None
        if expected is None and not are_alike:
            expected = self._run_whole(micro_batch, found, received)
        if expected is not None and not self._compare(found.form, expected, results):
            return None
        return [
            torch.cat([tensors[number] for tensors in results]) if joins else results[0][number]
            for number, joins in enumerate(self._joined[found.form])
        ]

    def _divided(self, call: ModelCall | None) -> _Parts | None:
        if call is None:
            return None
        arguments = by_name(self._model, *call)
        parts = sub_micro_batches(arguments, self._most)
        chances = tuple(module.p for module in self._dropouts)
        return None if len(parts) < 2 else _Parts((*form_of(arguments), chances), parts, arguments)

    def _run_whole(self, micro_batch: MicroBatch, found: _Parts, received: Sequence[Tensor]) -> list[Tensor]:
        """Leaves no traces."""
        assert self._split is not None
        drawn, values = library_rng_state(), ModelValues(self._model)
        shared: list[str] = []
        samples = found.parts[0].samples
        drawing, shares = PerSampleRandom(0, samples, samples), SharedValues(self._model).put_back(shared)
        with torch.no_grad(), shares, self._comparisons.forwards(), drawing:
            whole = self._split.body(self._index, micro_batch.loss, list(received), micro_batch.key)
        self._together[found.form] = Together(drawing.sizes, samples)
        if not same_library_rng_state(drawn, library_rng_state()):
            set_library_rng_state(drawn)
            self._keep_whole("its forward draws from Python's or numpy's generator")
        if shared:
            self._keep_whole(f"its forward changes {', '.join(shared)}")
        buffers, attributes = values.restore()
        if buffers:
            self._keep_whole("its forward changes buffers")
        if attributes:
            self._keep_whole(f"its forward changes attributes of its modules ({', '.join(attributes)})")
        return whole

    def _run_parts(
        self, micro_batch: MicroBatch, found: _Parts, received: Sequence[Tensor], *, again: bool
    ) -> tuple[list[list[Tensor]], bool]:
        """Returns what each part gives, and whether all have taken the same way through the blocks: if not, what one
        sample takes may depend on the others."""
        split, call, parts = self._split, micro_batch.loss.call, found.parts
        assert split is not None and call is not None
        known, chances = self._draws.get(found.form), self._chances.now()
        alone = self in micro_batch.draws_alone if again else known == (chances, False)
        if alone:
            micro_batch.draws_alone.add(self)
        split.take_drawn()
        inputs = list(zip(*(divide(tensor, parts) for tensor in received), strict=True)) or [()] * len(parts)
        together = self._together.get(found.form)
        modes = [PerSampleRandom(part.first, part.end, part.samples, together) for part in parts]

        taken: list[list[frozenset[int]]] = [[] for _ in parts]

        def one(number: int) -> list[Tensor]:
            if number == 1 and len(parts) > 2:
                self._group.turns.hand_over()
            part = ModelCall(call.module, (), parts[number].inputs)
            with contextlib.nullcontext() if alone else modes[number], ways() as taken[number]:
                return split.body(self._index, micro_batch.loss, list(inputs[number]), micro_batch.key, part)

        self._group.begin_turns()
        functions = [lambda number=number: one(number) for number in range(len(parts))]
        results = self._group.turns.run(functions, [split], self._generators)
        drawn = split.take_drawn() or any(mode.used for mode in modes)
        self._draws[found.form] = chances, drawn
        if drawn and alone and not again:
            logger.warning(BEGINS_TO_DRAW, 'tp_overlap="sub"')
        return results, all(one == taken[0] for one in taken)

    def _holds_of_other_weights(self, micro_batch: MicroBatch, found: _Parts, received: Sequence[Tensor]) -> bool:
        with torch.no_grad(), uniform_weights_filled(self._model):
            expected = self._run_whole(micro_batch, found, received)
            if self.reason or not all(bool(one.isfinite().all()) for one in expected if one.is_floating_point()):
                return not self.reason  # of numbers that are none nothing is learned
            return self._compare(found.form, expected, self._run_parts(micro_batch, found, received, again=False)[0])

    def _compare(self, form: Form, expected: Sequence[Tensor], results: Sequence[Sequence[Tensor]]) -> bool:
        """Learns how the parts' results make the whole one's; returns whether they do."""
        joined = []
        for number, tensor in enumerate(expected):
            pieces = [sent[number].detach() for sent in results]
            joins = sum(piece.shape[0] for piece in pieces if piece.ndim) == (tensor.shape[0] if tensor.ndim else -1)
            found = torch.cat(pieces) if joins else pieces[0]
            if not _close(found, tensor) or not (joins or all(_close(piece, tensor) for piece in pieces)):
                self._keep_whole("what it computes of a sample depends on the other samples of the micro-batch")
                return False
            joined.append(joins)
        self._joined[form] = joined
        return True

    def _keep_whole(self, reason: str) -> None:
        self.reason = self.reason or reason
        logger.warning(
            "tp_overlap: chunk %d runs its micro-batches whole, without hiding TP.sync: %s", self._index, self.reason
        )


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    largest = expected.abs().max() if expected.numel() else torch.zeros(())
    return bool(((found - expected).abs() <= tolerance(expected.dtype) * largest).all() or torch.equal(found, expected))
