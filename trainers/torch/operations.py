"""The operations of :mod:`trainers.operations` in PyTorch.

Images are NCHW, channels innermost in memory; sequences (examples, length, features).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trainers.operations import BN_EPSILON


class TorchOperations:
    """One forward pass."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        masks: Mapping[str, Tensor] | None,
        *,
        statistics: dict[str, Tensor] | None = None,
        observed: dict[str, Tensor] | None = None,
    ) -> None:
        """Args:
        tensors: weights and statistics by name.
        masks: dropout layer -> which units of this batch stay on; None: all of them.
        statistics: takes the batch's means and unbiased variances by name, and has batches normalised by them; None:
            by the running ones in ``tensors``.
        observed: takes the activations of observed layers by name.
        """
        self._tensors = tensors
        self._masks = masks
        self._statistics = statistics
        self._observed = observed

    def channels(self, x: Tensor) -> int:
        return x.shape[1] if x.ndim == 4 else x.shape[-1]

    def size(self, x: Tensor) -> tuple[int, int]:
        return x.shape[2], x.shape[3]

    def conv(
        self,
        x: Tensor,
        name: str,
        out: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = False,
        law: str = "kaiming",
    ) -> Tensor:
        return F.conv2d(
            x,
            self._tensors[f"{name}.weight"],
            self._tensors[f"{name}.bias"] if bias else None,
            stride=stride,
            padding=kernel // 2 if padding is None else padding,
            groups=groups,
        )

    def batch_norm(self, x: Tensor, name: str, *, last_in_block: bool = False, full_rate: bool = False) -> Tensor:
        mean, variance = self._tensors[f"{name}.mean"], self._tensors[f"{name}.var"]
        if self._statistics is not None:
            # Running statistics that remember nothing are those of the batch.
            mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
            self._statistics[f"{name}.mean"], self._statistics[f"{name}.var"] = mean, variance
        return F.batch_norm(
            x,
            mean,
            variance,
            self._tensors[f"{name}.weight"],
            self._tensors[f"{name}.bias"],
            training=self._statistics is not None,
            momentum=1.0,
            eps=BN_EPSILON,
        )

    def relu(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def dropout(self, x: Tensor, name: str, rate: float) -> Tensor:
        if self._masks is None:
            return x
        mask = self._masks[name].to(x.dtype)
        return x * (mask[:, None] if x.ndim == 3 else mask) * (1 / (1 - rate))

    def linear(self, x: Tensor, name: str, out: int) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def max_pool(self, x: Tensor, kernel: int, stride: int | None = None, padding: int = 0) -> Tensor:
        return F.max_pool2d(x, kernel, stride, padding)

    def global_average_pool(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))

    def flatten(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def subsample(self, x: Tensor, stride: int) -> Tensor:
        return x[:, :, ::stride, ::stride]

    def pad_channels(self, x: Tensor, channels: int) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, channels - x.shape[1]))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x.chunk(2, dim=1)
        return one, other

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), dim=1)

    def channel_shuffle(self, x: Tensor, groups: int) -> Tensor:
        # With the channels last, so that they stay innermost in memory.
        rows = x.permute(0, 2, 3, 1)
        shuffled = rows.reshape(*rows.shape[:3], groups, -1).transpose(3, 4).flatten(3)
        return shuffled.permute(0, 3, 1, 2)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y)

    def embedding(self, x: Tensor, name: str, vocabulary: int, width: int) -> Tensor:
        return F.embedding(x, self._tensors[f"{name}.weight"])

    def lstm(self, x: Tensor, name: str, hidden: int) -> Tensor:
        recurrent = self._tensors[f"{name}.recurrent"]
        state = cell = x.new_zeros(len(x), hidden)
        states = []
        for gates in self.linear(x, name, 4 * hidden).unbind(1):
            enter, forget, candidate, leave = F.linear(state, recurrent).add(gates).chunk(4, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            state = leave.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states, dim=1)

    def qrnn(self, x: Tensor, name: str, hidden: int, window: int = 2) -> Tensor:
        length = x.shape[1]
        past = [F.pad(x, (0, 0, lag, 0))[:, :length] for lag in reversed(range(window))]
        gates = self.linear(torch.cat(past, dim=2), name, 3 * hidden)
        candidate, forget, leave = gates.chunk(3, dim=2)
        forget, new = forget.sigmoid(), forget.neg().sigmoid() * candidate.tanh()
        cell, cells = torch.zeros_like(new[:, 0]), []
        for keep, value in zip(forget.unbind(1), new.unbind(1), strict=True):
            cell = keep * cell + value
            cells.append(cell)
        return leave.sigmoid() * torch.stack(cells, dim=1)

    def observe(self, x: Tensor, name: str) -> Tensor:
        if self._observed is not None:
            self._observed[name] = x.detach()
        return x
