"""Random numbers of code that computes a part of something: it draws those that all of it would have drawn there.

So masks of dropout do not depend on how samples, heads or neurons are divided, if generators begin with the same
states. It costs numbers drawn for nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fold3d import seeding
from fold3d._C import draw_position, note_product, reseed, seed_inside
from fold3d.device import default_device
from fold3d.errors import Fold3dError
from fold3d.sharding.shard import NOT_KNOWN, Slices, even_part
from fold3d.tensor_parallel.checkpoints import CheckpointMemory, in_reentrant_checkpoint
from fold3d.tensor_parallel.operators import of_fold3d
from fold3d.torch_private import checkpoint_around, run_again_within

Size = tuple[int, ...]


_MOST_KNOWN = 16


class Chances:
    """The numbers among the attributes of a module and those in it that may be chances of dropout, and which of them
    train: what is drawn may change with them."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [(vars(one), name) for one in module.modules() for name in _of_chances(one)]
        self._nothing, self._something = set[tuple[Any, ...]](), set[tuple[Any, ...]]()

    def now(self) -> tuple[Any, ...]:
        """Returns them as they are."""
        return tuple([values.get(name) for values, name in self._places])

    def draw_nothing(self, chances: tuple[Any, ...]) -> bool:
        """Returns whether, as far as is known, nothing is drawn with these."""
        return chances in self._nothing

    def note(self, chances: tuple[Any, ...], *, drawn: bool) -> None:
        """With these, something was drawn or not; what was once is from then on."""
        if drawn:
            self._something.add(chances)
            self._nothing.discard(chances)
        elif chances not in self._something:
            self._nothing.add(chances)
        for known in (self._nothing, self._something):
            if len(known) > _MOST_KNOWN:  # they change all the time
                known.clear()


def _of_chances(module: nn.Module) -> list[str]:
    names = ["training"]
    names += [
        name for name, value in vars(module).items() if type(value) is float or (type(value) is int and not value)
    ]
    if isinstance(module, nn.modules.dropout._DropoutNd) and "p" not in names:
        names.append("p")
    return names


class RedrawError(Fold3dError):
    """What is drawn could not be drawn alike when backward computes it again."""


class PartialDraws(TorchFunctionMode):
    """While it is entered, dropout and other random functions draw for the whole and take their part."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """How many draws there were, of which some may draw nothing; an activation checkpoint runs again from the
        number that it began with."""
        self.has_drawn = False
        self._generators = seeding.generators_of(default_device())
        self._memory = CheckpointMemory()
        self._with_grad = torch.is_grad_enabled()
        around = checkpoint_around()
        self._around = None if around is None else around.frame  # who runs that one again makes another mode

    def whole(self, size: Size, *, draws: bool = True) -> Size | None:
        """Returns the size for the whole of a part that is to be drawn; None where it is drawn as it is.

        Args:
            draws: whether anything is drawn: dropout with a chance of 0 counts, too.
        """
        self._follow_checkpoint()
        self.number += 1
        self.has_drawn = self.has_drawn or draws
        return self.whole_of(size, self.number - 1) if draws else None

    def whole_of(self, size: Size, number: int) -> Size | None:
        """Returns what `whole` does, for draw `number`."""
        raise NotImplementedError

    def part(self, drawn: Tensor) -> Tensor:
        """Returns the part of what was drawn for the size that `whole` returned last."""
        raise NotImplementedError

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Writes the part into what `part` would return it of."""
        self.part(whole).copy_(part)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        handler = _HANDLERS.get(func)
        if handler is None:
            before = draw_position(self._generators)
            result = func(*args, **named)
            if draw_position(self._generators) != before:
                drawn = next((one for one in tree_leaves(result) if isinstance(one, Tensor)), None)
                self.refuse(getattr(func, "__name__", str(func)), None if drawn is None else tuple(drawn.shape))
            return result
        with of_fold3d():
            drawn = handler(self, func, args, named)
        if handler is _attention:  # as it counts where nothing is drawn
            values = _of_attention(args, named)
            note_product(drawn, [values["query"], values["key"], values["value"]])
        return drawn

    def refuse(self, name: str, size: Size | None) -> None:
        """Raises: RedrawError where a part of what `name` has drawn would have to be taken."""
        if size is not None and self.whole(size) is None:
            return  # all ranks draw it
        raise RedrawError(
            f"it draws random numbers by {name}, of which a rank, or a part of a micro-batch, cannot take its share of "
            "what one process draws: draw by torch.rand, randn or rand_like, or by a dropout; or set tp=1 and no "
            "micro_batch_size"
        )

    def _follow_checkpoint(self) -> None:
        """Makes backward draw alike when it runs the code of an activation checkpoint again: torch restores generators
        for it, and autocast, but no function modes."""
        here, run = checkpoint_around(), self._memory.run()
        if here is None or run is None:
            # Not one around all of this, see above.
            if self._with_grad and not torch.is_grad_enabled() and in_reentrant_checkpoint():
                raise RedrawError(
                    "it draws random numbers in a reentrant torch.utils.checkpoint (use_reentrant=False would do)"
                )
        elif here.frame is not self._around and not run.again and not run.values:
            run.values["first"] = self.number
            run_again_within(here.frame, partial(self._from, self.number))

    @contextlib.contextmanager
    def _from(self, first: int) -> Iterator[None]:
        """Around a run of a checkpoint that begins with draw `first`."""
        before, self.number = self.number, first
        try:
            with self:
                yield
        finally:
            self.number = before


_least = [0.0]
"""The smallest chance of dropout; no context variable, which greenlets would not have."""


@contextlib.contextmanager
def all_draw(chance: float) -> Iterator[None]:
    """Every dropout drops out with at least this chance, in training or not, where a mode is entered."""
    before, _least[0] = _least[0], chance
    try:
        yield
    finally:
        _least[0] = before


def _dropout(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    x, asked, training, inplace = _arguments(args, named)
    p = max(asked if training else 0.0, _least[0])
    size = mode.whole(tuple(x.shape), draws=p > 0.0)
    if size is None:
        if not _least[0]:
            return func(*args, **named)
        dropped = func(x, p, True)
        return x.copy_(dropped) if inplace else dropped
    if func in _FEATURES:  # a mask per channel
        size = (*size[:2], *(1 for _ in size[2:]))
    # By torch's own dropout, whose numbers on an accelerator are those of a kernel of its own.
    noise = torch.dropout(x.new_ones(size), p, True)
    kept = mode.part(noise).clone()  # autograd keeps it: a view would be all of it
    return x.mul_(kept) if inplace else x * kept


def _arguments(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Tensor, float, bool, bool]:
    values = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | {
        "p" if name == "p" else "training" if name == "train" else name: value for name, value in named.items()
    }
    return values["input"], values.get("p", 0.5), values.get("training", True), values.get("inplace", False)


def _drawn_like(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    like = args[0]
    size = mode.whole(tuple(like.shape))
    if size is None:
        return func(*args, **named)
    return mode.part(func(like.new_empty(size), *args[1:], **named))


def _drawn_of_size(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    asked = named.pop("size", None) or (args[0] if args and not isinstance(args[0], int) else args)
    size = mode.whole(tuple(asked))
    return mode.part(func(tuple(size), **named)) if size is not None else func(tuple(asked), **named)


def _drawn_in_place(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    tensor = args[0]
    size = mode.whole(tuple(tensor.shape))
    if size is None:
        return func(*args, **named)
    with torch.no_grad():
        tensor.copy_(mode.part(func(tensor.new_empty(size), *args[1:], **named)))
    return tensor


def _bernoulli(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    of = args[0]
    size = mode.whole(tuple(of.shape))
    if size is None:
        return func(*args, **named)
    chances = of.new_full(size, 0.5)
    mode.put(chances, of)
    return mode.part(func(chances, *args[1:], **named))


def _attention(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    values = _of_attention(args, named)
    query, key, value = values["query"], values["key"], values["value"]
    p, mask, scale = max(values.get("dropout_p", 0.0), _least[0]), values.get("attn_mask"), values.get("scale")
    size = mode.whole((*query.shape[:-1], key.shape[-2]), draws=p > 0.0)
    if size is None:
        return func(**{**values, "dropout_p": p})
    if values.get("enable_gqa", False):
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    # What torch computes for a dropout, written out: it takes no mask.
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if values.get("is_causal", False):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    noise = torch.dropout(query.new_ones(size), p, True)
    return (_safe_softmax(scores) * mode.part(noise).clone()) @ value


def _of_attention(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return dict(zip(names, args, strict=False)) | named


def _safe_softmax(scores: Tensor) -> Tensor:
    """Returns the softmax over the last dimension, and as torch's attention 0 for a row that is masked whole."""
    masked = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0)


_TRAINING = {F.alpha_dropout: 2, F.feature_alpha_dropout: 2, F.rrelu: 3, torch.rrelu: 3}
"""Which argument says whether such a function draws."""
_OTHERS = (torch.normal, torch.randint, torch.randperm, torch.multinomial, torch.poisson, F.gumbel_softmax, *_TRAINING)


def _other(mode: PartialDraws, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Draws as it is, where all ranks do. Raises: RedrawError where a part of the whole's would have to be taken."""
    drawn = func(*args, **named)
    place = _TRAINING.get(func)
    is_on = place is None or named.get("training", args[place] if len(args) > place else False)
    if is_on:
        mode.refuse(func.__name__, tuple(drawn.shape))
    else:
        mode.whole(tuple(drawn.shape), draws=False)
    return drawn


_FEATURES = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout, *_FEATURES), _dropout),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), _drawn_like),
    **dict.fromkeys((torch.rand, torch.randn), _drawn_of_size),
    **dict.fromkeys((Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_), _drawn_in_place),
    **dict.fromkeys((Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_), _drawn_in_place),
    Tensor.random_: _drawn_in_place,
    **dict.fromkeys(_OTHERS, _other),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    F.scaled_dot_product_attention: _attention,
}


class ShardRandom(PartialDraws):
    """While it is entered, around one call of a block, draw k is `draws[k]` (`BlockSplit.draws`): its units' part of
    what all ranks draw alike, or what all ranks draw alike.

    A draw in a region that was not there when the block was split, or has another form now, is an error: nobody knows
    whose units it is for. Outside of regions all ranks compute the same, and draw it as it is.
    """

    def __init__(self, draws: Sequence[Slices | None], rank: int, in_region: Callable[[], bool]) -> None:
        """Args:
        in_region: whether what runs is computed by each rank for its share of units.
        """
        super().__init__()
        self._draws, self._rank, self._in_region = draws, rank, in_region
        self._taken: Slices | None = None

    def whole_of(self, size: Size, number: int) -> Size | None:
        if number >= len(self._draws):
            self._refuse_inside(size, number)
            return None
        draw = self._draws[number]
        if draw is None:
            return None
        times, rest = 0, 1
        if draw != NOT_KNOWN and draw.dim < len(size):
            times, rest = divmod(size[draw.dim], draw.length(self._rank))
        if rest:
            self._refuse_inside(size, number)
            return None
        self._taken = draw
        return (*size[: draw.dim], times * draw.size, *size[draw.dim + 1 :])

    def _refuse_inside(self, size: Size, number: int) -> None:
        if self._in_region():
            raise Fold3dError(
                f"tp: random numbers of the size {tuple(size)} are drawn, as number {number + 1} in a call of the "
                f"block, by each rank for its share. When the block was divided, it drew {len(self._draws)} times, or "
                "in other sizes at this place. A block must draw alike in every call: give it a chance of 0, or set "
                "tp=1"
            )

    def part(self, drawn: Tensor) -> Tensor:
        assert self._taken is not None, "`whole` returned a size"
        return self._taken.take(drawn, self._rank)

    def put(self, whole: Tensor, part: Tensor) -> None:
        assert self._taken is not None, "`whole` returned a size"
        self._taken.put(whole, part, self._rank)


class DrawsOfShares:
    """What the forwards of a block draw, of which it is known which part is whose; all ranks of the group alike.

    Where a call has drawn nothing, the next ones are left alone, until chances of dropout have changed.
    """

    def __init__(self, block: nn.Module, draws: Sequence[Slices | None], rank: int) -> None:
        self._block, self._draws, self._rank = block, draws, rank
        self._chances = Chances(block)

    @contextlib.contextmanager
    def around(self, in_region: Callable[[], bool]) -> Iterator[bool]:
        """Around one call, in which a rank draws its part of what one process draws; yields whether it does so.

        Raises: Fold3dError where it draws another number of times than when it was divided.
        """
        chances = self._chances.now()
        if self._chances.draw_nothing(chances):
            yield False
            return
        mode = ShardRandom(self._draws, self._rank, in_region)
        with mode:
            yield True
        self._chances.note(chances, drawn=mode.has_drawn)
        if mode.has_drawn and mode.number < len(self._draws):
            raise Fold3dError(
                f"tp: a {type(self._block).__name__} draws random numbers {mode.number} times in a call; when it was "
                f"divided, it did {len(self._draws)} times, so it is not known which of them are left out. A block "
                "must draw alike in every call: set chances of dropout to 0 where they are used, or set tp=1"
            )


class RowsRandom(PartialDraws):
    """While it is entered, dropout and other random functions on tensors like the hidden state draw for the whole
    sequence and take this rank's part, so masks are those of one rank. Within a region they are left alone."""

    def __init__(
        self, shape: torch.Size, dim: int, length: int, size: int, rank: int, in_region: Callable[[], bool]
    ) -> None:
        """Args:
        shape: of this rank's part of the hidden state, whose sequence is `dim`.
        length: of the whole sequence.
        size: ranks of the tensor-parallel group.
        rank: this one's place in it.
        in_region: whether what runs is computed by each rank for its share of units.
        """
        super().__init__()
        self.used = False
        """Whether anything was drawn."""
        self._shape, self._dim, self._length = tuple(shape), dim % len(shape), length
        self._rows = even_part(length, size, rank)
        self._in_region = in_region

    def whole_of(self, size: Size, number: int) -> Size | None:
        if self._in_region():
            return None
        samples, rows = self._shape[0], self._shape[self._dim]
        any_width = rows > 1  # else other tensors look like a hidden state, too
        if size == self._shape or (any_width and size[:-1] == self._shape[:-1]):
            return (*size[: self._dim], self._length, *size[self._dim + 1 :])
        folded = (samples * rows, *self._shape[2:])  # samples and their sequences in one dimension
        if self._dim == 1 and (size == folded or (any_width and size[:-1] == folded[:-1])):
            return (samples * self._length, *size[1:])
        per_sample = size[:1] == (samples,) and math.prod(size) == samples
        if rows > 1 and not per_sample and (rows in size or rows * samples in size):
            raise Fold3dError(
                f"sequence_parallel: random numbers of the size {tuple(size)} are drawn on {rows} of {self._length} "
                f"rows of the sequence, for {samples} samples, and it is not known which of the whole sequence's. Set "
                "sequence_parallel=False, or the chance to 0"
            )
        return None

    def part(self, drawn: Tensor) -> Tensor:
        self.used = True
        rows = self._rows_of(drawn)
        return rows.flatten(0, 1) if drawn.dim() < len(self._shape) else rows

    def put(self, whole: Tensor, part: Tensor) -> None:
        rows = self._rows_of(whole)
        rows.copy_(part.reshape(rows.shape))

    def _rows_of(self, whole: Tensor) -> Tensor:
        """Returns a view of this rank's rows, with a dimension for the samples, where `whole` has none, in front."""
        first, end = self._rows
        if whole.dim() < len(self._shape):
            whole = whole.view(self._shape[0], self._length, *whole.shape[1:])
        return whole.narrow(self._dim, first, end - first)


@dataclass(frozen=True, slots=True)
class Together:
    """What a forward of several samples has drawn."""

    sizes: Sequence[Size]
    samples: int

    def is_shared(self, size: Size, number: int, mine: int) -> bool:
        """Returns whether draw `number`, of this size where there are `mine` samples, was as large with all of them."""
        return mine != self.samples and number < len(self.sizes) and self.sizes[number] == size


class PerSampleRandom(PartialDraws):
    """While it is entered, random functions draw for all samples and take those of [first, end).

    What is drawn follows the samples if it did where more of them were together; where nobody has looked, if its
    dimension 0 is a multiple of their number, which is the caller's to check.
    """

    def __init__(self, first: int, end: int, samples: int, together: Together | None = None) -> None:
        """Args:
        together: what was drawn where more samples were together.
        """
        super().__init__()
        self._first, self._end, self._samples, self._together = first, end, samples, together
        self.used = False
        """Whether anything was drawn."""
        self.sizes: list[Size] = []
        """Of everything that was drawn, or could have been."""

    def whole(self, size: Size, *, draws: bool = True) -> Size | None:
        self.sizes.append(size)
        if self._end - self._first == self._samples:  # all of them, which draw as they are
            self.number += 1
            self.used = self.has_drawn = self.used or draws
            return None
        return super().whole(size, draws=draws)

    def whole_of(self, size: Size, number: int) -> Size | None:
        mine = self._end - self._first
        if not size or size[0] % mine:
            return None
        if self._together is not None and self._together.is_shared(size, number, mine):
            return None
        return (size[0] // mine * self._samples, *size[1:])

    def part(self, drawn: Tensor) -> Tensor:
        each = drawn.shape[0] // self._samples
        self.used = True
        return drawn[self._first * each : self._end * each]


logger = logging.getLogger(__name__)

BEGINS_TO_DRAW = (
    "the model's forward begins to draw random numbers, which it did not before. With %s it draws those of the whole "
    "micro-batch in one process; in this forward it has drawn others, in the next ones it does not"
)
"""Where nobody looked, since there were none."""

_warned: set[str] = set()


class ShardDraws:
    """Forks the generators of a device where a region begins, and puts them back where it ends.

    What a rank draws inside is a pure function of its place in the group, of the region and of the common state at the
    region's begin. So a region that backward computes again, under torch.utils.checkpoint, draws what it drew; and
    where nothing is drawn inside, what is drawn outside is the same as without shards.
    """

    def __init__(self, rank: int, block: str = "") -> None:
        """Args:
        block: the class of the block, to say once that its ranks draw masks of their own; nothing is said without it.
        """
        self._rank, self._block = rank, block
        self._saved: list[tuple[torch.Generator, torch.Tensor]] = []
        self._begun: list[torch.Tensor] = []

    def fork(self, device: torch.device, region: int) -> None:
        """Region number `region` of a block begins; without effect inside of one."""
        if self._saved:
            return
        generators = seeding.generators_of(device)
        self._saved = [(generator, generator.get_state()) for generator in generators]
        with torch._C.DisableTorchFunction(), of_fold3d():  # no draw of the block's, nor an operator
            seed = int(torch.randint(1 << 62, (1,), device="cpu"))  # as if it were not drawn, once the region has ended
        reseed(generators, seed_inside(seed, seeding.constant_of(f"shard {self._rank} of region {region}")))
        if self._block and self._block not in _warned:
            self._begun = [generator.get_state() for generator in generators]

    def join(self) -> None:
        """The region has ended, or was left by an exception."""
        for (generator, _), begun in zip(self._saved, self._begun, strict=False):
            if not torch.equal(generator.get_state(), begun) and self._block not in _warned:
                _warned.add(self._block)
                logger.warning(
                    "tp: each rank draws random numbers of its own for its share of a %s, because it is not known "
                    "which part of the whole block's they are, or that there are any. Its dropout is as strong, but "
                    "its masks are not those of tp=1.",
                    self._block,
                )
        for generator, state in self._saved:
            generator.set_state(state)
        self._saved, self._begun = [], []
