"""The networks of the image examples, at a chosen width: 64 is the published one, 8 trains in a test."""

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution beside a shortcut (He et al. 2015), the stride in the 3x3 one."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inputs, width, 1, bias=False),
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.Conv2d(width, outputs, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(conv.out_channels) for conv in self.convs)
        nn.init.zeros_(self.norms[2].weight)  # a block starts as its shortcut (Goyal et al. 2017)
        self.shortcut = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(y if i == 0 else torch.relu(y)))
        return torch.relu(y + self.shortcut(x))


def resnet50(classes=1000, width=64):
    """25.6 million parameters at full width, nearly all in convolutions: little for sufficient factors to do."""
    layers = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def vgg16(classes=1000, width=64):
    """138 million parameters at full width, 124 million of them in three fully connected layers (Simonyan and
    Zisserman 2014).
    """
    layers, channels = [], 3
    for stage, convolutions in enumerate((2, 2, 3, 3, 3)):
        outputs = width << min(stage, 3)
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    features, hidden = 49 * channels, 64 * width
    for _ in range(2):
        layers += [nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Dropout()]
        features = hidden
    return nn.Sequential(*layers, nn.Linear(features, classes))


NETWORKS = {"resnet50": resnet50, "vgg16": vgg16}
