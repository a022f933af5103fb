"""What must hold of the results of a parity case."""

from __future__ import annotations

import torch

from tests.dist.parity_cases import Case
from tests.dist.parity_jobs import Result

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def assert_equal(ours: Result, reference: Result, tolerance: float) -> None:
    """Losses and gradient norms of every step (relative above 1), every parameter (absolute)."""
    for name in ("losses", "norms"):
        mine, theirs = getattr(ours, name), getattr(reference, name)
        assert len(mine) == len(theirs) > 0
        for step, (value, wanted) in enumerate(zip(mine, theirs, strict=True)):
            difference = abs(value - wanted) / max(1.0, abs(wanted))
            assert difference <= tolerance, f"{name}[{step}] = {value}, expected {wanted}: off by {difference:.1e}"
    # A state_dict of a module has tied weights under each of their names, fold3d's under one.
    assert ours.weights and set(ours.weights) <= set(reference.weights)
    for name, wanted in reference.weights.items():
        if name in ours.weights:
            torch.testing.assert_close(
                ours.weights[name], wanted, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def assert_all_names(ours: Result, model: torch.nn.Module) -> None:
    """Every parameter of the model is there, under its first name."""
    assert {name for name, _ in model.named_parameters()} <= set(ours.weights)


def assert_ranks_agree(results: list[Result], case: Case) -> None:
    """Every rank reports the same, and all copies of a parameter and its optimizer state are the same bits."""
    for other in results[1:]:
        assert (other.losses, other.norms) == (results[0].losses, results[0].norms)
        assert other.weights.keys() == results[0].weights.keys()
        assert all(torch.equal(other.weights[name], tensor) for name, tensor in results[0].weights.items())
    for step, hashes in enumerate(zip(*(result.digests for result in results), strict=True)):
        copies: dict[str, set[str]] = {}
        for rank in hashes:
            for name, text in rank.items():
                copies.setdefault(name, set()).add(text)
        different = [name for name, texts in copies.items() if len(texts) > 1]
        assert not different, f"{case.name}: look {step}: copies of {different} differ"


def assert_same_bits(ours: Result, theirs: Result) -> None:
    """Two runs gave the same numbers to the bit: losses, norms, weights, optimizer state."""
    numbers, wanted = (ours.losses, ours.norms), (theirs.losses, theirs.norms)
    assert numbers == wanted, f"losses, norms: {numbers}, and {wanted}"
    assert ours.weights.keys() == theirs.weights.keys()
    different = [name for name, tensor in ours.weights.items() if not torch.equal(tensor, theirs.weights[name])]
    assert not different, f"{different} differ"
    if ours.state is None:
        return
    mine, other = ours.state["optimizer"], theirs.state["optimizer"]
    assert mine.keys() == other.keys()
    for name, values in mine.items():
        assert values.keys() == other[name].keys()
        for key, value in values.items():
            same = (
                torch.equal(value, other[name][key]) if isinstance(value, torch.Tensor) else value == other[name][key]
            )
            assert same, f"{key} of {name} differs"
