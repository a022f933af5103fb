"""Logits in parts: what losses, metrics and models do with them gives what it gives of whole ones, with gradients."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fold3d.sharding.shard import Shard
from fold3d.tensor_parallel.vocabulary import VocabularyParallelLogits, gathered
from fold3d.tensor_parallel.vocabulary.column_parallel import Columns
from tests.tensor_parallel.vocabulary.emulated import NothingWhole, ThreadedOps, on_ranks

V, H, B, L = 23, 6, 2, 5
LABELS = torch.randint(0, V, (B, L), generator=torch.Generator().manual_seed(1))
RAGGED = LABELS.clone()
RAGGED[0, 2:] = -100
FEW = torch.where(LABELS < 8, LABELS, -100)  # none on the last ranks
PROBABILITIES = torch.rand(B, L, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).softmax(-1)
BIAS = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def masked_lm(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), **options)


def causal_lm(logits: Tensor, labels: Tensor = RAGGED) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), labels[..., 1:].reshape(-1))


def soft_capped(logits: Tensor) -> Tensor:
    logits = logits / 3.0
    return causal_lm(torch.tanh(logits) * 3.0)


def z_loss(logits: Tensor) -> Tensor:
    return masked_lm(logits, RAGGED) + 0.1 * logits.logsumexp(-1).square().mean()


def picked(logits: Tensor) -> Tensor:
    """As libraries for preferences compute log-probabilities."""
    logits = logits[:, :-1]
    chosen = torch.gather(logits, dim=-1, index=LABELS[:, 1:, None]).squeeze(-1)
    return (chosen - torch.stack([torch.logsumexp(one, dim=-1) for one in logits])).sum()


def entropy(logits: Tensor) -> Tensor:
    return -F.nll_loss((logits.softmax(-1) * logits.log_softmax(-1)).flatten(0, 1), LABELS.flatten())


def written_scalar(logits: Tensor) -> Tensor:
    logits = logits.clone()
    logits *= 2
    logits.div_(3).add_(1)
    return causal_lm(logits)


def label_smoother(logits: Tensor) -> Tensor:
    """The stock Trainer's, of `label_smoothing_factor`."""
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(epsilon=0.2)({"logits": logits}, RAGGED.clone(), shift_labels=True)


def distilled(logits: Tensor, reduction: str) -> Tensor:
    return F.kl_div(F.log_softmax(logits / 2, dim=-1), PROBABILITIES, reduction=reduction)


LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda x: masked_lm(x, LABELS),
    "ragged": lambda x: masked_lm(x, RAGGED),
    "few": lambda x: masked_lm(x, FEW),
    "causal": causal_lm,
    "sum": lambda x: masked_lm(x, RAGGED, reduction="sum") / 7,
    "none": lambda x: (masked_lm(x, RAGGED, reduction="none") * torch.arange(B * L)).sum(),
    "smoothed": lambda x: masked_lm(x, RAGGED, label_smoothing=0.1),
    "module": lambda x: nn.CrossEntropyLoss(ignore_index=3)(x.flatten(0, 1), LABELS.flatten()),
    "weighted": lambda x: masked_lm(x, RAGGED, weight=torch.arange(V).double()),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), RAGGED),
    "permuted": lambda x: F.cross_entropy(x.permute(2, 0, 1).permute(1, 0, 2), RAGGED),
    "one token": lambda x: F.cross_entropy(x[0, 1], LABELS[0, 1]),
    "log_softmax": lambda x: F.nll_loss(F.log_softmax(x, dim=-1).view(-1, V), RAGGED.view(-1)),
    "nll weighted": lambda x: F.nll_loss(x.log_softmax(2).mT, RAGGED, weight=torch.arange(V).double() + 1),
    "soft-capped": soft_capped,
    "z-loss": z_loss,
    "picked": picked,
    "entropy": entropy,
    "bias": lambda x: causal_lm(x + BIAS),
    "masked entries": lambda x: causal_lm(torch.where(torch.arange(V) % 5 == 1, -1e9, x), RAGGED // 5 * 5),
    "no entries": lambda x: causal_lm(x.masked_fill(torch.arange(V) < 9, -torch.inf), torch.where(LABELS < 9, -100, 9)),
    "chunks": lambda x: sum(masked_lm(a, b) for a, b in zip(x.split(2, 1), LABELS.split(2, 1), strict=True)),
    "rows": lambda x: masked_lm(x[RAGGED > 0], RAGGED[RAGGED > 0]),
    "joined": lambda x: masked_lm(torch.cat([x, -x]), LABELS.repeat(2, 1)),
    "stacked": lambda x: torch.stack([x, x])[0, ..., 1:, :].logsumexp(-1).sum(),
    "squares": lambda x: x.square().sum() + x.mean() + x.mean((0, -1)).norm() + x.sum(1)[:, None].logsumexp(2).sum(),
    "distilled": lambda x: distilled(x, "batchmean") + distilled(x, "mean") + distilled(x, "sum"),
    "label smoother": label_smoother,
    "probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), PROBABILITIES.flatten(0, 1)),
    "probabilities second": lambda x: F.cross_entropy(x.mT, PROBABILITIES.mT, reduction="none").norm(),
    "last": lambda x: x[:, -1:].squeeze(1).logsumexp(-1).sum(),
    "written": written_scalar,
    "checkpoint": lambda x: checkpoint(causal_lm, x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(lambda x: causal_lm(x.float().double() * 1), x, use_reentrant=True),
}  # fmt: skip


def write_some(logits: Tensor) -> Tensor:
    logits[:, :, torch.tensor([0, 21])] = -50.0
    return causal_lm(logits, LABELS.clamp(1, 20))


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda x: x.topk(3, -1).values.sum(),
    "part of the entries": lambda x: causal_lm_of_few(x[..., :17]),
    "flat": lambda x: x.reshape(-1).std(),
    "matrix": lambda x: (x @ torch.eye(V).double()).norm(),
    "norm": lambda x: x.norm(),
    "twice": lambda x: causal_lm(x) + x.square().mean() + x.std(),
    "written": write_some,
    "function": Squares.apply,
}


def causal_lm_of_few(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten().clamp(max=16))


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(B, L, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
        torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(),
    )


def head(ops: ThreadedOps, x: Tensor, weight: Tensor) -> tuple[VocabularyParallelLogits, Tensor]:
    columns = Columns(Shard.even(0, V, ops.size), ops)
    part = weight.detach()[columns.first : columns.end].clone().requires_grad_()
    return VocabularyParallelLogits.of(F.linear(columns.share(x), part), columns, 2), part


def compare(use: Callable[[Tensor], Tensor], size: int, *, local: bool, tolerance: float = 1e-12) -> None:
    x, weight = inputs()
    whole = use(F.linear(x, weight))
    whole.backward()
    wanted = x.grad, weight.grad

    def run(ops: ThreadedOps) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = inputs()
        watch = NothingWhole(V) if local else contextlib.nullcontext()
        logits, part = head(ops, x, weight)
        with watch:
            loss = use(logits)
            loss.backward()
        assert type(loss) is Tensor
        return loss.detach(), x.grad, part.grad

    results = on_ranks(size, run)
    for loss, gradient, _ in results:
        torch.testing.assert_close(loss, whole.detach(), rtol=0, atol=tolerance)
        torch.testing.assert_close(gradient, wanted[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(torch.cat([part for *_, part in results]), wanted[1], rtol=0, atol=tolerance)


@pytest.mark.filterwarnings("ignore:reduction")  # torch's, of kl_div's mean
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("use", LOCAL.values(), ids=LOCAL)
def test_losses_in_parts(use: Callable[[Tensor], Tensor], size: int) -> None:
    # float64 with weights would be the vocabulary's own size; masks and biases of all entries are the test's.
    names = "weighted", "nll weighted", "masked entries", "no entries", "probabilities", "probabilities second"
    own = use in [LOCAL[name] for name in names]
    in_fp32 = LOCAL["reentrant"], LOCAL["label smoother"]
    compare(use, size, local=not own, tolerance=1e-6 if use in in_fp32 else 1e-12)


@pytest.mark.parametrize("use", GATHERED.values(), ids=GATHERED)
def test_what_needs_them_whole(use: Callable[[Tensor], Tensor]) -> None:
    compare(use, 3, local=False)


def one_rank_of_two(function: Callable[[ThreadedOps, VocabularyParallelLogits, Tensor], Any]) -> list[Any]:
    def run(ops: ThreadedOps) -> Any:
        logits, part = head(ops, *inputs())
        return function(ops, logits, part)

    return on_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_types(dtype: torch.dtype, autocast: bool) -> None:
    """The loss has torch's type, and is as exact as torch's in that type."""

    def use(logits: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return masked_lm(logits, RAGGED), logits.log_softmax(-1).exp().sum()

    exact = masked_lm(F.linear(*inputs()).detach(), RAGGED)
    whole = use(F.linear(*inputs(dtype)))

    def run(ops: ThreadedOps) -> tuple[Tensor, ...]:
        logits, part = head(ops, *inputs(dtype))
        found = use(logits)
        found[0].backward()
        assert part.grad.dtype == dtype and part.grad.isfinite().all()
        return tuple(gathered(list(found)))

    for loss, total in on_ranks(3, run):
        assert loss.dtype == whole[0].dtype and total.dtype == whole[1].dtype
        limit = 2e-6 if dtype == torch.float32 else 3e-2
        assert abs(loss.double() - exact) <= max(limit, 1.2 * abs(whole[0].double() - exact))


def test_the_usual_loss_meets_once_and_with_little() -> None:
    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> list[tuple[int, ...]]:
        causal_lm(logits.float()).backward()
        return ops.sums

    # per rank and token: logsumexp and target's logit; then the gradient of the head's input
    assert one_rank_of_two(run) == [[(2, B * (L - 1), 2), (B, L, H)]] * 2


def test_it_is_a_tensor() -> None:
    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> None:
        assert isinstance(logits, Tensor) and torch.is_tensor(logits) and len(logits) == B
        assert logits.shape == (B, L, V) and logits.size(-1) == V and logits.size() == torch.Size((B, L, V))
        assert logits.dim() == logits.ndim == 3 and logits.numel() == B * L * V and logits.stride() == (L * V, V, 1)
        assert logits.dtype == torch.float64 and logits.device.type == "cpu" and logits.is_floating_point()
        assert logits.requires_grad and not logits.detach().requires_grad and not logits.is_leaf
        assert logits.double() is logits and logits.to(torch.float64) is logits and logits.contiguous() is logits
        assert logits.to("cpu") is logits and logits.to(torch.float32).dtype == torch.float32
        assert logits.type_as(part) is logits and part.float().type_as(logits).dtype == torch.float64
        outputs = torch.utils._pytree.tree_map(lambda leaf: leaf, {"logits": [logits]})
        assert outputs["logits"][0] is logits and hash(logits) == hash(logits)
        assert "columns" in repr(logits) and "columns" in f"{logits}" and not ops.sums
        assert [tuple(row.shape) for row in logits] == [(L, V)] * B and not ops.sums
        assert logits[0].T.shape == (V, L) and logits[0].T.is_contiguous() is False and not ops.sums

    one_rank_of_two(run)


def test_whole_logits_where_asked() -> None:
    exact = F.linear(*inputs()).detach()

    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> None:
        everything = gathered({"loss": 1.0, "logits": (logits.detach(), None)})
        whole = everything["logits"][0]
        assert type(whole) is Tensor
        torch.testing.assert_close(whole, exact, rtol=0, atol=1e-12)
        for same in (copy.deepcopy(logits.detach()), pickle.loads(pickle.dumps(logits.detach())), logits.data.cpu()):
            assert type(same) is Tensor and torch.equal(same, whole)
        stored = io.BytesIO()
        torch.save(logits.detach(), stored)
        stored.seek(0)
        assert torch.equal(torch.load(stored, weights_only=True), whole)
        assert logits.detach().numpy().shape == whole.shape and logits.tolist() == whole.tolist()
        assert torch.equal((logits > 0).sum(-1), (whole > 0).sum(-1)) and (logits > 0).sum() == (whole > 0).sum()
        assert torch.equal(logits.argmax(), whole.argmax())
        ops.sums.clear()
        assert torch.equal(logits.argmax(-1), whole.argmax(-1))
        assert torch.equal(logits.argmax(dim=2, keepdim=True), whole.argmax(dim=2, keepdim=True))
        assert ops.sums == [(2, B, L, 2)] * 2

    one_rank_of_two(run)


def test_argmax_of_equal_entries_is_the_first() -> None:
    def run(ops: ThreadedOps) -> Tensor:
        columns = Columns(Shard.even(0, V, ops.size), ops)
        whole = torch.zeros(2, V)
        whole[1, [4, 20]] = 1.0
        part = whole[:, columns.first : columns.end]
        return VocabularyParallelLogits.of(part, columns, 1).argmax(-1)

    assert [found.tolist() for found in on_ranks(3, run)] == [[0, 4]] * 3


def test_gathered_once_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> list[tuple[int, ...]]:
        (logits.std() + logits.std() + logits.norm()).backward()
        with torch.no_grad():
            logits.detach().median()
        return ops.sums

    with caplog.at_level(logging.WARNING):
        sums = one_rank_of_two(run)
    # gathered for the first function, the head's backward, and of the detached ones anew
    assert sums == [[(B, L, V), (B, L, H), (B, L, V)]] * 2
    said = [record.getMessage().split("'")[1] for record in caplog.records]
    assert said == ["std", "norm"]


def test_the_gradient_of_logits() -> None:
    """Hooks see it, and it can be asked for, in parts."""
    x, weight = inputs()
    whole = F.linear(x, weight)
    wanted = torch.autograd.grad(causal_lm(whole) + whole.std(), whole)[0]

    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> None:
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        logits.retain_grad()
        (causal_lm(logits) + logits.std()).backward()
        for found in (*seen, logits.grad):
            assert found.shape == wanted.shape
            torch.testing.assert_close(gathered(found), wanted, rtol=0, atol=1e-12)

    one_rank_of_two(run)


def test_a_leaf_of_its_own() -> None:
    """Code that computes the loss apart from the model: of detached logits, whose gradient it hands to the model."""
    x, weight = inputs()
    causal_lm(F.linear(x, weight)).backward()

    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> Tensor:
        apart = logits.detach().requires_grad_()
        causal_lm(apart).backward()
        logits.backward(apart.grad)
        return part.grad

    torch.testing.assert_close(torch.cat(one_rank_of_two(run)), weight.grad, rtol=0, atol=1e-12)


def test_writing_into_a_view_is_refused() -> None:
    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> None:
        with pytest.raises(RuntimeError, match="'mul_' writes into a view of logits"):
            logits[:, -1].mul_(2.0)
        with torch.no_grad():
            logits[:, -1].mul_(0.0)
        assert not logits.memory()[:, -1].any()

    one_rank_of_two(run)


def test_labels_that_are_no_entries() -> None:
    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> None:
        with pytest.raises(IndexError, match=f"index {V} is out of range: the vocabulary has {V} entries"):
            masked_lm(logits, torch.full((B, L), V))
        with pytest.raises(IndexError, match="index -1 is out of range"):
            masked_lm(logits, torch.full((B, L), -1))

    one_rank_of_two(run)


def test_nothing_to_learn() -> None:
    """All labels ignored: torch's mean is nan, its sum 0 with a gradient of 0."""

    def run(ops: ThreadedOps, logits: VocabularyParallelLogits, part: Tensor) -> None:
        none = torch.full((B, L), -100)
        assert masked_lm(logits, none).isnan()
        loss = masked_lm(logits, none, reduction="sum")
        loss.backward()
        assert loss == 0 and not part.grad.any()

    one_rank_of_two(run)


def test_the_watch_sees_whole_logits() -> None:
    with pytest.raises(AssertionError, match=f"made a tensor of .*{V}"):
        compare(GATHERED["norm"], 2, local=True)


def test_inference_mode() -> None:
    with torch.inference_mode():
        whole = F.linear(*inputs())
        wanted = causal_lm(whole)

    def run(ops: ThreadedOps) -> None:
        with torch.inference_mode():
            logits, _ = head(ops, *inputs())
            torch.testing.assert_close(causal_lm(logits.float()), wanted.float(), rtol=0, atol=1e-6)
            torch.testing.assert_close(gathered(logits), whole, rtol=0, atol=1e-12)
            logits[..., 3] = 0.0
            assert not gathered(logits)[..., 3].any() and logits.argmax(-1).shape == (B, L)

    on_ranks(2, run)
