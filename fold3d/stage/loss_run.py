"""LossRun: a loss function as a coroutine, which runs once per micro-batch however the model is cut."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import greenlet
import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.utils._pytree import tree_leaves

from fold3d import seeding
from fold3d._C import reseed
from fold3d.errors import SplitError
from fold3d.stage.users_state import DrawnBehind, KeptAttributes, ModelState
from fold3d.tensor_parallel.turns import Switches, ThreadState, switched
from fold3d.torch_private import Depth, take_modes_off
from fold3d.trace.coat import Coat, Wrap
from fold3d.trace.wrappers import users_hooks

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


_SWITCHES: tuple[_Switch, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _deterministic,
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.autograd.set_detect_anomaly(*state),
    ),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
)


class GlobalSwitches:
    """Which attention kernels, dtypes and ways to compute torch uses in this process, as they are now."""

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SWITCHES]

    def restore(self) -> None:
        """Makes them what they were."""
        for (get, set_to), value in zip(_SWITCHES, self._values, strict=True):
            if get() != value:
                set_to(value)


CALLED_AGAIN = (
    "the loss function calls the model a second time for one micro-batch, and a model that is cut runs once. Put both "
    "inputs into one batch (torch.cat) and divide its outputs; let a model of its own, or a pass before training, "
    "compute what needs no gradients (a reference); or set pp=1 and segments=1, where nothing is cut"
)
NOT_CALLED = (
    "the loss function returned without calling the model, or called parts of it by themselves, and all chunks of a "
    "model that is cut must run for each micro-batch. Call model(**inputs) for each and multiply what is not wanted by "
    "zero, leave such batches out of the data, or set pp=1 and segments=1, where nothing is cut"
)
USES_A_PART = (
    "the loss function uses a part of the model by itself ({}), and a model that is cut runs its whole forward, chunk "
    "by chunk. Call model(**inputs) and compute the loss from what that returns, or set pp=1 and segments=1, where "
    "nothing is cut"
)


_LOOK = "a look"
"""In the place of a run of the model's forward."""


class ModelCall(NamedTuple):
    """A call of the model, or of a module that holds its blocks."""

    module: str
    """Its name; "" is the model itself."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self) -> dict[str, Any]:
        """Returns the arguments, those without a name by their place."""
        return {**{str(place): value for place, value in enumerate(self.args)}, **self.kwargs}


class _Coroutine(greenlet.greenlet):  # type: ignore[misc]
    def __init__(self, loss: LossRun, function: Callable[[], Any]) -> None:
        super().__init__(function)
        self.loss = loss


def _frames_of(coroutine: _Coroutine) -> Iterator[FrameType]:
    """Yields the frames of a coroutine that rests, the innermost one first."""
    frame = coroutine.gr_frame
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_loss() -> LossRun | None:
    """Returns the LossRun whose code runs; None outside of such code."""
    current = greenlet.getcurrent()
    return current.loss if isinstance(current, _Coroutine) else None


def refuse_part(name: str) -> None:
    """Raises SplitError when the code of a loss function runs: it uses module `name` of a model that is cut."""
    if running_loss() is not None:
        raise SplitError(USES_A_PART.format(name))


class LossRun:
    """One run of `function`, which calls the model: it rests there, and goes on with what the model returned.

    So a loss function runs once per micro-batch on each rank: every chunk runs the model's own forward with the
    arguments of that call, and in the modes that were on there (grad mode, autocast, hooks for saved tensors, function
    and dispatch modes, context variables, settings of torch); what the last chunk returns, the call returns. A rank
    without the last chunk lets go of it: the function ends where it rests. Used by one thread.

    What it sets before the call rests with it (see `KeptAttributes`): other micro-batches begin meanwhile.

    Attributes:
        call: of the model; None until there was one.
        looked: what the model's `CallGuard` has found out of it.
        is_over: whether it has ended.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        *,
        only_loss: bool = False,
        is_users: bool = True,
        keeps: Iterable[object] = (),
        weight: float = 1.0,
        sum_of: Callable[[Tensor], Tensor] = torch.sum,
    ) -> None:
        """Args:
        only_loss: of what the model returns the function reads nothing but the loss.
        is_users: it is code of the user's, or calls some.
        keeps: functions and objects of the user's through which it may set something, such as the trainer.
        weight: by which its result, a tensor, is multiplied.
        sum_of: fp64 [micro-batches] of a step -> the loss, scalar, that is told of it.
        """
        self.sum_of = sum_of
        self.weight = weight
        self._function, self._kept = function, KeptAttributes(keeps)
        self.only_loss, self.is_users = only_loss, is_users
        self._coroutine: _Coroutine | None = None
        self._rested: ThreadState | None = None
        self._settings: GlobalSwitches | None = None
        self._grad_before = True
        self.call: ModelCall | None = None
        self.looked: list[Any] = []
        self.is_over = self._once = False
        self._result: Any = None

    @classmethod
    def of(cls, function: Callable[[], Any] | LossRun, *, only_loss: bool = False) -> LossRun:
        """Returns a run of `function`, which may be one already."""
        return function if isinstance(function, LossRun) else cls(function, only_loss=only_loss)

    @property
    def has_begun(self) -> bool:
        """Whether any of the function has run."""
        return self._coroutine is not None or self.is_over

    @property
    def uses_weights(self) -> bool:
        """Whether what it calls the model with was computed from weights."""
        given = () if self.call is None else tree_leaves(self.call.named())
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given)

    def begin(
        self,
        model: nn.Module,
        names: Sequence[str],
        device: torch.device,
        key: tuple[int, int, int] | None,
        state: ModelState | None = None,
    ) -> None:
        """Runs the function up to its call of the model; to its end, where it does not call it.

        Args:
            names: of the modules whose call counts as the model's: "" and what holds its blocks.
            device: where the model runs.
            key: of the random numbers that are drawn, see `seeding`; None: the generators are left alone.
            state: of the model; None: no other run begins before this one is over, so nothing need rest with it.
        Raises: whatever the function raises.
        """
        self._model, self._names, self._kinds = model, list(names), [device.type]
        self._generators = [] if key is None else seeding.generators_of(device)
        if key is not None:
            reseed(self._generators, seeding.start(key))
        made = self._coroutine = _Coroutine(self, self._function)
        before = contextvars.copy_context()
        made.gr_context = before.copy()
        self._grad_before = torch.is_grad_enabled()
        rests: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if state is not None and (self.is_users or any(True for _ in users_hooks(model))):
            rests = self._kept.first_half(model, state, lambda: _frames_of(made))
        with self._as_before(), rests:
            self._run(made.switch)
        set_since = () if made.dead else made.gr_context.items()
        self._variables = {one: value for one, value in set_since if before.get(one, before) is not value}

    def attributes(self) -> contextlib.AbstractContextManager[None]:
        """Around a look at the attributes of the model's modules, as the model's forward finds them."""
        return self._kept.in_the_model(_LOOK)

    @contextlib.contextmanager
    def inside(self, run: object = None) -> Iterator[ModelCall]:
        """As inside of the model's call: in its modes, before the random numbers that come next there.

        Args:
            run: of the model's forward; the same for one that is to compute the same once more. None: the only one.
        """
        assert self._rested is not None and self.call is not None, "the model is called"
        with self._as_before(), contextlib.nullcontext() if run is None else self._kept.in_the_model(run):
            above = self._put_on(generators=True)
            tokens = [(one, one.set(value)) for one, value in self._variables.items()]
            try:
                yield self.call
            finally:
                for one, token in tokens:
                    one.reset(token)
                take_modes_off(above)

    def end(self, output: Any, *, apart: DrawnBehind | None = None) -> Any:
        """Goes on with what the model returned; returns what the function returns. Raises what that raises.

        Args:
            apart: of a model that is cut, which can run once only; other runs have begun meanwhile, or go on elsewhere,
                see `KeptAttributes`.
        """
        self._once = apart is not None
        if not self.is_over:
            with contextlib.nullcontext() if apart is None else self._kept.behind_the_model(apart):
                self._go_on(lambda coroutine: coroutine.switch(output))
        result, self._result = self._result, None  # whoever has it knows how long it is needed
        return result * self.weight if self.weight != 1.0 and isinstance(result, Tensor) else result

    def weigh(self, weight: float) -> None:
        """Its result, a tensor, is multiplied by `weight`."""
        self.weight = weight

    def for_the_step(self) -> LossRun | None:
        """The model has been built with it: returns it, to go on. None where it has to run anew: what it calls the
        model with was computed from weights, which may be others now.

        Python's and numpy's generators go on behind what it has drawn.
        """
        if self.uses_weights:
            self.let_go()
            return None
        self._kept.draw_on()
        return self

    def fail(self, error: BaseException) -> None:
        """The model's call has raised `error`, which the function sees there. Raises what that makes of it."""
        self._go_on(lambda coroutine: coroutine.throw(error))

    def let_go(self) -> None:
        """Ends the function where it rests: its context managers end, and nothing behind the model's call runs."""
        if self.has_begun and not self.is_over:
            self._go_on(lambda coroutine: coroutine.throw(greenlet.GreenletExit))

    def _go_on(self, how: Callable[[_Coroutine], Any]) -> None:
        coroutine = self._coroutine
        assert coroutine is not None
        coroutine.parent = greenlet.getcurrent()
        with self._as_before():
            self._put_on(generators=False)  # the model's forward has drawn meanwhile
            self._run(lambda: how(coroutine))

    def _put_on(self, *, generators: bool) -> Depth:
        assert self._rested is not None
        above = self._rested.add(generators=generators)
        if self._settings is not None:
            self._settings.restore()
        # Grad mode is that of who runs it, unless the function has changed it.
        self._rested.switches.restore(grad=self._rested.switches.grad != self._grad_before)
        return above

    def _run(self, switch: Callable[[], Any]) -> None:
        """Runs the function until it rests or ends."""
        depth = Depth.now()
        try:
            with Coat() as coat:
                for name in self._names:
                    self._rest_in(coat, name)
                result = switched(switch)
        except BaseException:
            self._over(None)
            raise
        assert self._coroutine is not None
        if self._coroutine.dead:
            self._over(result)
        else:
            self._rested = ThreadState(self._generators, kinds=self._kinds, above=depth)
            self._settings = GlobalSwitches() if self.is_users else None

    def _over(self, result: Any) -> None:
        self.is_over, self._result, self._coroutine = True, result, None

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        """Whatever grad mode, autocast and settings of torch are changed to, they are as before in the end."""
        switches, settings = Switches(self._kinds), GlobalSwitches() if self.is_users else None
        try:
            yield
        finally:
            switches.restore()
            if settings is not None:
                settings.restore()

    def _rest_in(self, coat: Coat, name: str) -> None:
        """Has the function rest where it calls the module."""
        module = self._model.get_submodule(name)
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if running_loss() is not self:
                return original(*args, **kwargs)
            if self.call is None:
                self.call = ModelCall(name, args, kwargs)
                return switched(greenlet.getcurrent().parent.switch)
            if self._once:
                raise SplitError(CALLED_AGAIN)
            return original(*args, **kwargs)

        coat.put(Wrap.RESTS, module, forward)
