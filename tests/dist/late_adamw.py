"""LateAdamW: the recursion of gradient_delay=1 in one process."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import AdamW


class LateAdamW(AdamW):
    """The recursion of gradient_delay=1 in one process: each call takes the gradients and settings of the call before,
    W(t+1) = W(t) - update(g(W(t-1)))."""

    _kept: list[tuple[dict[str, Any], list[Tensor | None]]] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keeps the gradients that there are now."""
        groups = [({k: v for k, v in group.items() if k != "params"}, group["params"]) for group in self.param_groups]
        now = [(s, [None if p.grad is None else p.grad.clone() for p in params]) for s, params in groups]
        self.finish()
        self._kept = now

    def finish(self) -> None:
        """Takes what the last call has kept."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        now = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        for group, (settings, gradients) in zip(self.param_groups, kept, strict=True):
            group.update(settings)
            for parameter, gradient in zip(group["params"], gradients, strict=True):
                parameter.grad = gradient
        super().step()
        for group, settings in zip(self.param_groups, now, strict=True):
            group.update(settings)


def late_norms(norms: list[float], delay: int) -> list[float]:
    """Returns the norms of the steps' own gradients as fold3d reports them."""
    return [0.0] * delay + norms[: len(norms) - delay]
