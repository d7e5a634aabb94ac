"""The benchmark's own networks: chains of equal layers, and two convolutional nets."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = 2  # in each of the four stages of ResNet-18


class Link(nn.Module):
    """One square layer of a chain; residual, so that signals survive hundreds of layers."""

    def __init__(self, side: int, residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(side, side, bias=False)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        if self.residual:
            return x + self.linear(F.rms_norm(x, x.shape[-1:]))
        return F.relu(self.linear(x))


class Chain(nn.Module):
    """Equal square layers in numbered blocks, so that routing takes none of them for a head."""

    def __init__(self, side: int, layers: int, residual: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Link(side, residual) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


class ConvNet(nn.Module):
    """Four 3×3 convolutions with stride 2 after the first, and a linear head."""

    def __init__(self, channels: int, classes: int = 10) -> None:
        super().__init__()
        widths = (3, channels, 2 * channels, 4 * channels, 4 * channels)
        parts: list[nn.Module] = []
        for i, (n, m) in enumerate(itertools.pairwise(widths)):
            conv = nn.Conv2d(n, m, 3, stride=2 if i else 1, padding=1, bias=False)
            parts += [conv, nn.BatchNorm2d(m), nn.ReLU()]
        self.features = nn.Sequential(*parts)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(images).mean((-2, -1)))
        return out


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet18(nn.Module):
    """He et al. (2016) as torchvision builds it, which need not be installed.

    Images [batch, 3, side, side] go in, scores [batch, classes] come out.

    Args:
        classes: number of classes.
        channels: width of the first stage, 64 in the paper; each stage doubles it.
    """

    def __init__(self, classes: int = 1000, channels: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        stages, inputs = [], channels
        for stage in range(4):
            outputs = channels * 2**stage
            for block in range(BLOCKS):
                stride = 2 if stage and not block else 1
                stages.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, stride=2, padding=1)
        scores: Tensor = self.fc(self.blocks(x).mean((-2, -1)))
        return scores
