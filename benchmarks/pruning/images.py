"""Models of images that are cut: what channels pass through between two convolutions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint


class Cnn(nn.Module):
    """Two convolutions and a linear head; between them what a subclass does."""

    def __init__(self, width: int = 16, head: int | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(head or width, 5)

    def between(self, x: Tensor) -> Tensor:
        """From the first convolution to the second."""
        return F.relu(x)

    def after(self, x: Tensor) -> Tensor:
        """From the second convolution to the head."""
        return F.relu(x).mean((2, 3))

    def forward(self, x: Tensor) -> Any:
        """(batch, 3, 8, 8) to (batch, 5)."""
        return self.head(self.after(self.second(self.between(self.first(x)))))


class Between(Cnn):
    """With a layer between."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def between(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x))


class Residual(Cnn):
    def after(self, x: Tensor) -> Tensor:
        return F.relu(x + x.roll(1, 2)).mean((2, 3))

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(x))
        return self.head((x + self.second(x)).mean((2, 3)))


class Scaled(Cnn):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 16, 1, 1))

    def between(self, x: Tensor) -> Tensor:
        return F.relu(x * self.scale)


class Shared(Cnn):
    def between(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(x)))


class Concat(Cnn):
    def __init__(self) -> None:
        super().__init__(head=32)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(x))
        return self.head(torch.cat([x, self.second(x)], 1).mean((2, 3)))


class Flattened(Cnn):
    def __init__(self) -> None:
        super().__init__(head=16 * 16)

    def after(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.relu(x), 2).flatten(1)


class FixedFlatten(Flattened):
    def after(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.relu(x), 2).view(-1, 256)


class FixedView(Cnn):
    def between(self, x: Tensor) -> Tensor:
        return F.relu(x.view(-1, 16, 64).view(-1, 16, 8, 8))


class Nhwc(Flattened):
    """Its channels are the last of what is flattened."""

    def after(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(x), 2)
        return x.permute(0, 2, 3, 1).reshape(len(x), -1)


class Shuffled(Cnn):
    """As ShuffleNet's: groups change places."""

    def between(self, x: Tensor) -> Tensor:
        batch, channels, *size = x.shape
        return F.relu(x.view(batch, 2, channels // 2, *size).transpose(1, 2).reshape(batch, channels, *size))


class Maxout(Cnn):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Conv2d(4, 16, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        batch, _, *size = x.shape
        return x.view(batch, -1, 4, *size).amax(2)


class Gated(Cnn):
    """``F.glu`` over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        return F.glu(x, 1)


class Shuffle(Cnn):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Conv2d(4, 16, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(x, 2)


class SlicedWeight(Cnn):
    """As slimmable networks: a part of a weight is used."""

    def forward(self, x: Tensor) -> Any:
        x = F.relu(F.conv2d(x, self.first.weight[:8], self.first.bias[:8], padding=1))
        x = F.relu(F.conv2d(x, self.second.weight[:, :8], self.second.bias, padding=1))
        return self.head(x.mean((2, 3)))


class Masked(Cnn):
    """A buffer of the width that is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", (torch.arange(16) % 5 > 0).float().view(1, 16, 1, 1))

    def between(self, x: Tensor) -> Tensor:
        return F.relu(x) * self.mask


class PlainMask(Cnn):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.linspace(0.5, 1.5, 16).view(1, 16, 1, 1)

    def between(self, x: Tensor) -> Tensor:
        return F.relu(x) * self.plain


class EvalLayer(Cnn):
    """A layer that training does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.calibrate = nn.Linear(16, 16)

    def after(self, x: Tensor) -> Tensor:
        x = F.relu(x).mean((2, 3))
        return x if self.training else self.calibrate(x)


class EvalBuffer(Cnn):
    """A buffer that training does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.shift: Tensor
        self.register_buffer("shift", torch.linspace(0.5, 1.5, 16))

    def after(self, x: Tensor) -> Tensor:
        x = F.relu(x).mean((2, 3))
        return x if self.training else x + self.shift


class Excited(Cnn):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)

    def between(self, x: Tensor) -> Tensor:
        weights = self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True))))
        return F.relu(x) * weights.sigmoid()


class Cbam(Excited):
    """And attention over places, by the mean and the most of all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Conv2d(2, 1, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        x = super().between(x)
        return x * self.places(torch.stack([x.mean(1), x.amax(1)], 1)).sigmoid()


class Cosine(Cnn):
    """Scores are cosines."""

    def forward(self, x: Tensor) -> Any:
        x = self.after(self.second(self.between(self.first(x))))
        return F.normalize(x) @ F.normalize(self.head.weight).T


class Checkpointed(Cnn):
    def between(self, x: Tensor) -> Tensor:
        recomputed: Tensor = checkpoint(F.relu, x, use_reentrant=False)
        return recomputed

    def after(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.second, F.relu(x), use_reentrant=False)
        return F.relu(again).mean((2, 3))


class Upsampled(nn.Module):
    """A transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.up(self.down(x)))


class Vae(nn.Module):
    """Mean and deviation are halves of one layer's output; noise is added in training."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 192))

    def forward(self, x: Tensor) -> Any:
        mean, deviation = self.encode(x).chunk(2, 1)
        if self.training:
            mean = mean + torch.randn_like(mean) * deviation.exp()
        return self.decode(mean), deviation


class ConvNeXt(nn.Module):
    """A depthwise convolution, a LayerNorm over channels that come last, two linear layers and a scale."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.gamma = nn.Parameter(torch.full((width,), 1e-6))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
            y = self.gamma * self.down(F.gelu(self.up(y)))
            return x + y.permute(0, 3, 1, 2)

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, 2)
        self.blocks = nn.Sequential(self.Block(width), self.Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.blocks(self.stem(x)).mean((2, 3))))


class MbConv(nn.Module):
    """As EfficientNet's: wider, depthwise, excited, narrower; a block is left out at random in training."""

    def __init__(self, width: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        inner, self.drop = 4 * width, drop
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU())
        self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(inner, inner, 3, 1, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.SiLU()
        )
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, 4, 1), nn.SiLU(), nn.Conv2d(4, inner, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        y = self.depth(self.expand(x))
        y = self.project(y * self.excite(y))
        if self.training and self.drop:
            y = y * (torch.rand(len(y), 1, 1, 1) + 1 - self.drop).floor() / (1 - self.drop)
        return self.head((x + y).mean((2, 3)))


class RegNet(nn.Module):
    """A bottleneck with a convolution in groups."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(width, 16, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1, groups=4), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, width, 1), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        return self.head(F.relu(x + self.body(x)).mean((2, 3)))


class DenseNet(nn.Module):
    """Each layer takes all before it."""

    def __init__(self, growth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, 1, 1)
        widths = [growth, 2 * growth, 3 * growth]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, 1, 1)) for width in widths
        )
        self.norm, self.head = nn.BatchNorm2d(4 * growth), nn.Linear(4 * growth, 5)

    def forward(self, x: Tensor) -> Any:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(F.relu(self.norm(torch.cat(found, 1))).mean((2, 3)))


class Inception(nn.Module):
    """Branches that are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.one = nn.Conv2d(8, 8, 1)
        self.three = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 1, 1))
        self.five = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 5, 1, 2))
        self.pool = nn.Conv2d(8, 4, 1)
        self.norm, self.head = nn.BatchNorm2d(28), nn.Linear(28, 5)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        parts = [self.one(x), self.three(x), self.five(x), self.pool(F.max_pool2d(x, 3, 1, 1))]
        return self.head(F.relu(self.norm(torch.cat(parts, 1))).mean((2, 3)))


class Siamese(nn.Module):
    """One trunk for two inputs, whose features are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Any:
        one, other = (self.trunk(each).mean((2, 3)) for each in (x, x.flip(3)))
        return self.head(torch.cat([one - other, one * other], 1))


class Outputs(Cnn):
    """Several heads; one of features that are cut nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.maps = nn.Linear(16, 4), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(x))
        y = F.relu(self.second(x))
        return {"scores": self.head(y.mean((2, 3))), "box": self.box(y.mean((2, 3))), "maps": self.maps(x)}


class SwinMerging(nn.Module):
    """Patches of two by two are concatenated, normalised and reduced."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.norm, self.reduce = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width)
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).permute(0, 2, 3, 1)
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        return self.head(self.reduce(self.norm(x)).mean((1, 2)))


class Swin(nn.Module):
    """Attention in windows, with a table of biases by head, and an MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.heads, self.stem = 4, nn.Conv2d(3, width, 1)
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(0.1 * torch.randn(4, 16, 16))
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).permute(0, 2, 3, 1)
        batch, height, breadth, width = x.shape
        windows = x.view(batch, height // 4, 4, breadth // 4, 4, width).transpose(2, 3).reshape(-1, 16, width)
        q, k, v = self.qkv(self.norm(windows)).view(-1, 16, 3, self.heads, width // 4).permute(2, 0, 3, 1, 4)
        mixed = ((q @ k.transpose(-2, -1)) / 2 + self.table).softmax(-1) @ v
        windows = windows + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head((windows + self.mlp(windows)).mean(1).view(batch, -1, width).mean(1))


def _with(**wrapped: Any) -> Any:
    """A plain one, some of whose layers are wrapped."""
    model = Cnn()
    for name, wrap in wrapped.items():
        setattr(model, name, wrap(getattr(model, name)))
    return model


def _frozen() -> nn.Module:
    model = Cnn()
    model.first.requires_grad_(False)
    return model


def _dropped() -> nn.Module:
    return Between(nn.Sequential(nn.BatchNorm2d(16), nn.Dropout(0.3)))


IMAGES = OrderedDict(
    {
        "BatchNorm": lambda: Between(nn.BatchNorm2d(16)),
        "depthwise": lambda: Between(nn.Conv2d(16, 16, 3, 1, 1, groups=16)),
        "convolution in groups": lambda: Between(nn.Conv2d(16, 16, 3, 1, 1, groups=4)),
        "GroupNorm": lambda: Between(nn.GroupNorm(4, 16)),
        "InstanceNorm": lambda: Between(nn.InstanceNorm2d(16, affine=True)),
        "PReLU of channels": lambda: Between(nn.PReLU(16)),
        "dropout": _dropped,
        "residual": Residual,
        "scale of channels": Scaled,
        "shared layer": Shared,
        "concatenated": Concat,
        "flattened": Flattened,
        "flattened to a number": FixedFlatten,
        "view of a number": FixedView,
        "flattened, channels last": Nhwc,
        "channel shuffle": Shuffled,
        "maxout": Maxout,
        "GLU": Gated,
        "pixel shuffle": Shuffle,
        "sliced weight": SlicedWeight,
        "buffer": Masked,
        "plain tensor": PlainMask,
        "layer in eval mode alone": EvalLayer,
        "buffer in eval mode alone": EvalBuffer,
        "squeeze and excitation": Excited,
        "CBAM": Cbam,
        "cosine head": Cosine,
        "checkpoint within": Checkpointed,
        "transposed convolution": Upsampled,
        "VAE": Vae,
        "frozen layer": _frozen,
        "bf16": lambda: Between(nn.BatchNorm2d(16)).bfloat16(),
        "weight norm": lambda: _with(first=weight_norm),
        "weight norm, the old one": lambda: _with(second=old_weight_norm),
        "spectral norm": lambda: _with(second=spectral_norm),
        "ConvNeXt": ConvNeXt,
        "EfficientNet": MbConv,
        "stochastic depth": lambda: MbConv(drop=0.2),
        "RegNet": RegNet,
        "DenseNet": DenseNet,
        "Inception": Inception,
        "Siamese": Siamese,
        "several outputs": Outputs,
        "Swin merging": SwinMerging,
        "Swin": Swin,
    }
)
