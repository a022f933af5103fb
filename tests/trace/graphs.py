"""Small models without a list of equal blocks, in fp64, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Convolution(nn.Module):
    def __init__(self, channels: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.weights = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.weights(x)))


class Residual(nn.Module):
    """Its own code adds what its modules return."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = Convolution(channels, outputs, stride)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + self.shortcut(x))


class ResidualNet(nn.Module):
    """Stages of different widths, in attributes of their own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = Convolution(3, 4)
        self.narrow = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.middle = nn.Sequential(Residual(4, 6, 2), nn.Dropout(dropout), Residual(6, 6, 1))
        self.wide = nn.Sequential(Residual(6, 8, 2))
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.wide(self.middle(self.narrow(self.stem(pixels))))
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class SkippingNet(nn.Module):
    """A U-Net: what goes down is read again on the way up."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        widths = [3, 4, 6, 8]
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Sequential(Convolution(a, b), Convolution(b, b)) for a, b in pairs)
        self.bottom = nn.Sequential(Convolution(8, 8), nn.Dropout(dropout), Convolution(8, 8))
        self.up = nn.ModuleList(Convolution(2 * b, a if a > 3 else b) for a, b in reversed(pairs))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        skipped, x = [], pixels
        for down in self.down:
            skipped.append(down(x))
            x = functional.max_pool2d(skipped[-1], 2)
        x = self.bottom(x)
        for up in self.up:
            x = up(torch.cat([functional.interpolate(x, scale_factor=2), skipped.pop()], 1))
        return functional.mse_loss(self.head(x)[:, 0].mean((1, 2)), labels.double())


def _resnet(dropout: float) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[8, 12], depths=[2, 2], num_labels=5)
    return ResNetForImageClassification(config)


def _swin(dropout: float) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(
        SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=5,
            hidden_dropout_prob=dropout, drop_path_rate=0.0,
        )
    )  # fmt: skip


def _segformer(dropout: float) -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return SegformerForSemanticSegmentation(
        SegformerConfig(
            num_encoder_blocks=3, depths=[1, 2, 1], sr_ratios=[2, 2, 1], hidden_sizes=[4, 8, 8], patch_sizes=[3, 3, 3],
            strides=[2, 2, 2], num_attention_heads=[1, 2, 2], mlp_ratios=[2, 2, 2], decoder_hidden_size=8, num_labels=5,
            hidden_dropout_prob=dropout, classifier_dropout_prob=dropout, drop_path_rate=0.0,
        )
    )  # fmt: skip


def _convnext(dropout: float) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[4, 8, 8], depths=[1, 2, 1], num_stages=3, patch_size=2, num_labels=5)
    return ConvNextForImageClassification(config)


def _images(name: str = "pixel_values", per_pixel: bool = False) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    pixels = torch.randn(2, 3, 16, 16, generator=made, dtype=torch.double)
    shape = (2, 16, 16) if per_pixel else (2,)
    return {name: pixels, "labels": torch.randint(0, 5, shape, generator=made)}


MODELS: dict[str, tuple[Callable[[float], nn.Module], Callable[[], dict[str, Any]]]] = {
    "residual": (ResidualNet, lambda: _images("pixels")),
    "skipping": (SkippingNet, lambda: _images("pixels")),
    "resnet": (_resnet, _images),
    "swin": (_swin, _images),
    "segformer": (_segformer, lambda: _images(per_pixel=True)),
    "convnext": (_convnext, _images),
}


def build(family: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model and a batch for it."""
    torch.manual_seed(0)
    model, batch = MODELS[family]
    return model(dropout).double().train(), batch()
