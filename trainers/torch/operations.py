"""The operations of :mod:`trainers.network` in PyTorch. Activations are NCHW, channels innermost in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trainers.network import BN_EPSILON, BN_MOMENTUM


class TorchOperations:
    """One forward pass. Batch-norm statistics in ``tensors`` are updated in place while training."""

    def __init__(self, tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None) -> None:
        """Args:
        tensors: weights and statistics by name.
        masks: dropout layer -> which units of this batch stay on; None in evaluation mode.
        """
        self._tensors = tensors
        self._masks = masks

    def channels(self, x: Tensor) -> int:
        return x.shape[1]

    def conv(self, x: Tensor, name: str, out: int, kernel: int, *, stride: int = 1) -> Tensor:
        return F.conv2d(x, self._tensors[f"{name}.weight"], stride=stride, padding=kernel // 2)

    def batch_norm(self, x: Tensor, name: str, *, last_in_block: bool = False, full_rate: bool = False) -> Tensor:
        return F.batch_norm(
            x,
            self._tensors[f"{name}.mean"],
            self._tensors[f"{name}.var"],
            self._tensors[f"{name}.weight"],
            self._tensors[f"{name}.bias"],
            training=self._masks is not None,
            momentum=BN_MOMENTUM,
            eps=BN_EPSILON,
        )

    def relu(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def dropout(self, x: Tensor, name: str, rate: float) -> Tensor:
        if self._masks is None:
            return x
        return x * self._masks[name].to(x.dtype) * (1 / (1 - rate))

    def linear(self, x: Tensor, name: str, out: int) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def global_average_pool(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))

    def flatten(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def subsample(self, x: Tensor, stride: int) -> Tensor:
        return x[:, :, ::stride, ::stride]

    def pad_channels(self, x: Tensor, channels: int) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, channels - x.shape[1]))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y)
