"""Models that decide by values: what follows from the batch alone is known to the recording, and guards it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fold3d.errors import SplitError, TraceError
from fold3d.stage.call_guard import other_blocks
from fold3d.trace import Trace, trace
from tests.trace.chains import assert_equal, chained, ranks_of, whole
from tests.trace.zoo import Plain


class Deciding(Plain):
    """Decides by its batch what happens around the blocks."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        return super().forward(input_ids + self.shift(input_ids, mask), labels)

    def shift(self, input_ids: Tensor, mask: Tensor | None) -> Any:
        return 0


def batch(**more: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 9, (2, 6), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(1, 1), **more}


def built(model_class: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model_class().double()


def halves(model: nn.Module, example: dict[str, Tensor]) -> tuple[Trace, list[Any]]:
    recorded = trace(model, example=example)
    return recorded, ranks_of(model, recorded, [(0, 2), (2, 4)], 2)


class Checking(Deciding):
    """Most ways of looking at values."""

    def shift(self, input_ids: Tensor, mask: Tensor | None) -> Any:
        assert mask is not None
        lengths = mask.sum(1)
        if input_ids.max() > 1000:
            raise ValueError("no such token")
        if torch.equal(mask, torch.ones_like(mask)) or not mask.any():
            return 1
        places = mask.nonzero()
        chosen = input_ids[mask]
        assert chosen.shape[0] == len(places) == int(lengths.sum()) == len(input_ids.masked_select(mask))
        borders = torch.tensor([0, *lengths]).cumsum(0)
        assert borders[0] == 0 and int(borders[-1]) == len(chosen)
        parts = torch.split(chosen, lengths.tolist())
        shifted = torch.zeros_like(input_ids)
        for row, part in enumerate(parts):
            shifted[row, : len(part)] = part % 2
        return shifted


def test_values_of_the_batch_are_known() -> None:
    model = built(Checking)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    given = batch(mask=mask)
    before = {name: tensor.clone() for name, tensor in given.items()}
    recorded, ranks = halves(model, given)
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())
    read = [value for _, value in recorded.decisions.read]
    assert False in read
    assert 10 in read
    assert_equal(chained(ranks, recorded, 2, given), whole(model, given))


class Skipping(Deciding):
    """Reads what the first block returned once more, behind the last one, if there is anything to be left out."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        assert mask is not None
        skips = not bool(mask.all())
        x = self.embedding(input_ids)
        first: Any = None
        for layer in self.layers:
            x = layer(x)
            first = x if first is None else first
        x = x + first if skips else x
        assert labels is not None
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("first", [True, False])
def test_a_micro_batch_that_decides_otherwise_is_recorded_anew(first: bool) -> None:
    """What the recorded one did not need crosses the border for those that do."""
    model = built(Skipping)
    full = torch.ones(2, 6, dtype=torch.bool)
    ragged = full.clone()
    ragged[1, 3:] = False
    one, other = batch(mask=full), batch(mask=ragged)
    if not first:
        one, other = other, one
    recorded, ranks = halves(model, one)
    assert len(recorded.crossings[2]) == (1 if first else 2)
    for given in (one, other, one, other):
        assert_equal(chained(ranks, recorded, 2, given), whole(model, given))


class Sized(nn.Module):
    """Shortens by as much as a mask of floats says; as a module in front of the blocks, others' chunks leave it out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if int(mask.sum()) != 3:
            raise ValueError(f"this is shortened by 3, not {mask.sum()}")
        return x[:, int(mask.sum()) :] * self.scale


class BySize(Deciding):
    """Has one."""

    def __init__(self) -> None:
        super().__init__()
        self.sized = Sized()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        x = self.sized(x, torch.ones(3, dtype=x.dtype))
        for layer in self.layers:
            x = layer(x)
        assert labels is not None
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels[:, 3:].flatten())}


def test_stand_ins_know_the_values_of_floats_they_are_given() -> None:
    """They had none there."""
    model, one = built(BySize), batch()
    recorded, ranks = halves(model, one)
    assert_equal(chained(ranks, recorded, 2, one), whole(model, one))


class Counting(Skipping):
    """Like Skipping, but by the number of places of a mask."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        assert mask is not None
        input_ids = input_ids.clone()
        input_ids[~mask] = 1
        places = (~mask).nonzero()
        return super().forward(input_ids, labels, torch.full((2,), len(places) == 0))


def test_masks_that_are_empty_are_recorded_apart() -> None:
    model = built(Counting)
    full = torch.ones(2, 6, dtype=torch.bool)
    ragged, shorter = full.clone(), full.clone()
    ragged[1, 3:] = shorter[1, 2:] = False
    recorded, ranks = halves(model, batch(mask=full))
    guard = ranks[0]._guard
    for mask in (full, ragged, shorter, full):
        given = batch(mask=mask)
        assert_equal(chained(ranks, recorded, 2, given), whole(model, batch(mask=mask)))
    (forms,) = guard._known.values()
    assert [len(known) for known in forms.values()] == [2]  # what is empty differs, not how much there is


class Turning(Skipping):
    """Runs its blocks the other way round for some batches."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        assert mask is not None
        x = self.embedding(input_ids)
        for layer in self.layers if mask.all() else reversed(self.layers):
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


def test_a_micro_batch_for_which_the_cut_is_wrong_is_refused() -> None:
    model = built(Turning)
    full = torch.ones(2, 6, dtype=torch.bool)
    recorded, ranks = halves(model, batch(mask=full))
    ragged = full.clone()
    ragged[1, 3:] = False
    with pytest.raises(SplitError, match=r"cannot be run on this cut .* the blocks run in another order"):
        chained(ranks, recorded, 2, batch(mask=ragged))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (["text.0", "text.1"], r"block 'image.0' does not run in it, and all micro-batches must run the same"),
        (["image.0", "text.0", "text.1", "text.2"], r"block 'text.2' runs in it, and all micro-batches must"),
        (["text.0", "text.1", "image.0"], r"the blocks run in another order"),
    ],
)
def test_the_reason_names_the_first_other_block(run: list[str], reason: str) -> None:
    assert re.match(reason, other_blocks(["image.0", "text.0", "text.1"], run))


class Overwriting(Deciding):
    """Looks at what it has written activations into."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        own = self.made(x)
        part = own[0]
        own.copy_(x)
        if part.sum() > 0:
            x = -x
        for layer in self.layers:
            x = layer(x)
        return x

    def made(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=x.dtype)


class OverwritingAlike(Overwriting):
    """Of the shape of activations, as well."""

    def made(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)


@pytest.mark.parametrize("model_class", [Overwriting, OverwritingAlike])
def test_what_is_overwritten_with_activations_is_not_known(model_class: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"'if part.sum\(\) > 0:'"):
        trace(built(model_class), example=batch())


class Filling(Deciding):
    """Decides by constants of the shape of activations, by lists of places, and by memory that it has filled itself."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        assert mask is not None
        x = self.embedding(input_ids)
        free = torch.ones_like(x[:, :, 0]).bool()
        rows, columns = zip(*mask.nonzero(), strict=True)
        free[rows, columns] = False
        starts = torch.empty(len(mask), dtype=torch.long)
        starts[0] = 0
        starts[1:] = mask.sum(1).cumsum(0)[:-1]
        if free[0].any():
            x = -x
        x = x + torch.arange(int(starts[1]), int(starts[1]) + x.shape[1])[None, :, None]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_constants_of_the_shape_of_activations_are_known() -> None:
    model = built(Filling)
    full = torch.ones(2, 6, dtype=torch.bool)
    recorded, ranks = halves(model, batch(mask=full))
    assert [value for _, value in recorded.decisions.read] == [False, 6, 6]
    assert_equal(chained(ranks, recorded, 2, batch(mask=full)), whole(model, batch(mask=full)))
    for row in (0, 1):
        ragged = full.clone()
        ragged[row, 4:] = False
        assert recorded.decisions.hold_for(batch(mask=ragged)) is False  # other places, of another number
        assert_equal(chained(ranks, recorded, 2, batch(mask=ragged)), whole(model, batch(mask=ragged)))


class Dropping(Deciding):
    """Leaves out blocks at random."""

    rate = 0.0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            drawn = torch.rand([])
            if self.training and drawn < self.rate:
                continue
            x = layer(x)
        return x


def test_layerdrop_is_refused_with_its_reason_unless_it_drops_nothing() -> None:
    model = built(Dropping)
    assert len(trace(model, example=batch()).blocks) == 4
    model.rate = 0.1  # type: ignore[assignment]
    with pytest.raises(TraceError, match=r"drawn < self.rate.*drawn at random \(such as layerdrop\)"):
        trace(model, example=batch())


class Direct(Plain):
    """Calls its blocks by their forward."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer.forward(x)
        return {"loss": self.head(x).square().mean()}


def test_blocks_that_are_called_by_their_forward() -> None:
    model = built(Direct)
    recorded, ranks = halves(model, batch())
    assert_equal(chained(ranks, recorded, 2, batch()), whole(model, batch()))


class Nested(nn.Module):
    """Stages of blocks in a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for stage in self.stages:
            for layer in stage:
                x = x + layer(x).tanh()
        return {"loss": x.square().mean()}


def test_lists_of_lists_are_one_row_of_blocks() -> None:
    model = built(Nested)
    given = {"x": torch.randn(3, 4, dtype=torch.float64)}
    recorded, ranks = halves(model, given)
    assert recorded.blocks == ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1")
    assert_equal(chained(ranks, recorded, 2, given), whole(model, given))


def test_losses_over_alignments_are_recorded() -> None:
    class Aligned(Nested):
        def forward(self, x: Tensor) -> Any:
            for stage in self.stages:
                for layer in stage:
                    x = x + layer(x).tanh()
            lengths = torch.full((x.shape[1],), len(x))
            targets = torch.ones(x.shape[1], 2, dtype=torch.long)
            loss = nn.functional.ctc_loss(x.log_softmax(-1), targets, lengths, torch.full_like(lengths, 2))
            return {"loss": loss}

    model = built(Aligned)
    given = {"x": torch.randn(7, 3, 4, dtype=torch.float64)}
    recorded, ranks = halves(model, given)
    assert_equal(chained(ranks, recorded, 2, given), whole(model, given))
