"""WholeModel: a model that is not cut runs by its own forward; only dropout is seeded, as in every other layout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fold3d import seeding
from fold3d._C import ForwardCursor, next_seed, reseed, seed_inside
from fold3d.stage.loss_run import LossRun
from fold3d.stage.recompute import recompute_modules
from fold3d.torch_private import in_backward
from fold3d.trace.arguments import ancestors
from fold3d.trace.blocks import outer_modules
from fold3d.trace.coat import Coat, Wrap


class WholeModel:
    """Stands where a SplitModel stands, for a model of one chunk: nothing is recorded, replaced or skipped.

    So a loss function may call the model as often as it likes, read all of its outputs and pass any argument. Masks of
    dropout follow the chain of seeds (see `seeding`) by hooks around the blocks and around what lies outside of them;
    further calls of a micro-batch go on with the chain.

    Args:
        blocks: names of the model's blocks, see `find_blocks`; empty where none are known: the micro-batch alone seeds.
        recompute: of the blocks those that backward computes again instead of keeping their activations (training mode
            only).
        coat: what is put on the model goes with it.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], *, recompute: Collection[str] = (), coat: Coat | None = None
    ) -> None:
        self.cursor: ForwardCursor | None = None
        self.begun: nn.Module | None = None
        self._has_drawn = False
        self.generators = [torch.default_generator]
        self._ends: list[Tensor] = []
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._model, self._callable = model, ancestors(blocks)
        self._coat = Coat() if coat is None else coat
        outer = outer_modules(model, blocks) if blocks else []
        for name, module in [*((name, model.get_submodule(name)) for name in blocks), *outer]:
            hooks = _Around(self, name, is_block=name in blocks)
            self._coat.put(Wrap.SEED, module, hooks.before)
            self._coat.put(Wrap.SEED_AFTER, module, hooks.after)
        if blocks:
            self._coat.put(Wrap.ENDS, model.get_submodule(blocks[-1]), self._ended)
        recompute_modules(self._coat, model, recompute)

    def run(
        self,
        chunk: int,
        call: Callable[[], Any] | LossRun,
        inputs: list[Tensor],
        key: tuple[int, int, int] | None,
        *,
        only_loss: bool = False,
    ) -> tuple[list[Tensor], Any]:
        """Runs `call`, as `SplitModel.run` does for the last chunk; it may call the model as often as it likes.

        Args:
            key: (seed, step, global micro-batch) of the dropout masks; None: no reseeding (evaluation).
        Returns: an empty list and what `call` returned.
        """
        loss = LossRun.of(call, only_loss=only_loss)
        self.begin(loss, key)
        _, output = self.forward(chunk, loss, inputs, key)
        return [], self.end(loss, output)

    def begin(self, loss: LossRun, key: tuple[int, int, int] | None) -> None:
        """Runs a loss function up to its call of the model, unless it has."""
        self.generators = seeding.generators_of(self._device)
        self.begun = None
        with self._cursor_ends_with_errors():
            self.cursor = None if key is None else ForwardCursor(0, seeding.start(key), self.generators)
            if not loss.has_begun:
                loss.begin(self._model, self._callable, self._device, key)

    def forward(
        self, chunk: int, loss: LossRun, inputs: list[Tensor], key: tuple[int, int, int] | None
    ) -> tuple[list[Tensor], Any]:
        """Runs the model's forward with the arguments of the call at which the loss function rests, if it does.

        Returns: an empty list and what the model returned.
        """
        if loss.call is None:
            return [], None
        with self._cursor_ends_with_errors():
            try:
                with loss.inside() as call:
                    return [], self._model.get_submodule(call.module).forward(*call.args, **call.kwargs)
            except Exception as error:
                loss.fail(error)  # it may have something to say of it
                return [], None

    def end(self, loss: LossRun, output: Any) -> Any:
        """The loss function goes on with what the model returned; returns what it returns."""
        try:
            return loss.end(output)
        finally:
            self._has_drawn = self.cursor is not None and self.cursor.has_drawn
            self.cursor = self.begun = None

    def take_drawn(self) -> bool:
        """Returns as `SplitModel.take_drawn`."""
        drawn, self._has_drawn = self._has_drawn, False
        return drawn

    @contextlib.contextmanager
    def _cursor_ends_with_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.cursor = self.begun = None
            raise

    def take_ends(self) -> list[Tensor]:
        """Returns as `SplitModel.take_ends`."""
        ends, self._ends = self._ends, []
        return ends

    def _ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.cursor is not None and torch.is_grad_enabled():
            self._ends += [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]

    def remove(self) -> None:
        """Takes the hooks off the model again."""
        self._coat.close()

    def put_aside(self) -> tuple[ForwardCursor | None, nn.Module | None]:
        """Returns where the run under way is, for another one to begin."""
        state = self.cursor, self.begun
        self.cursor = self.begun = None
        return state

    def take_up(self, state: tuple[ForwardCursor | None, nn.Module | None]) -> None:
        """Goes on with the run that `put_aside` returned."""
        self.cursor, self.begun = state

    def began(self, module: nn.Module | None) -> None:
        """`module` has begun with a seed of its own; None: it has ended."""
        self.begun = module


class _Around:
    """The hooks of one module, next to the forward itself: what other hooks draw is not the module's."""

    def __init__(self, whole: WholeModel, name: str, *, is_block: bool) -> None:
        self._whole, self._is_block = whole, is_block
        self._enter = seeding.constant_of(f"{name}:enter")
        self._leave = seeding.constant_of(f"{name}:leave")
        self._carried: int | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        whole = self._whole
        if whole.cursor is not None:
            if whole.cursor.begin_module(self._enter):
                whole.began(module)
        elif (seed := _seed_in_backward()) is not None:
            reseed(whole.generators, seed_inside(seed, self._enter))
            self._carried = seed

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        whole = self._whole
        if whole.cursor is not None:
            if whole.begun is module or self._is_block:
                whole.began(None)
                whole.cursor.end_module(self._leave)
        elif self._carried is not None:
            reseed(whole.generators, next_seed(self._carried, self._leave))
            self._carried = None


def _seed_in_backward() -> int | None:
    """Returns the chain's seed that a checkpoint of the user's own code restored to run modules again in backward."""
    return seeding.carried() if in_backward() else None
