"""A network on one device, run by PyTorch: eager on CPU, everything resident, no wait inside an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from protocols.contract import Dataset, Network
from protocols.recipe import Recipe
from trainers.batches import EVALUATION_BATCH, EpochPlan, padded_pixels, pixel_grids
from trainers.network import Architecture
from trainers.torch.operations import TorchOperations


class Examples:
    """A dataset on a device: raw pixels, padded for crops once; normalised after a batch has been gathered."""

    def __init__(self, data: Dataset, recipe: Recipe, device: torch.device) -> None:
        dtype = getattr(torch, recipe.dtype)
        self.pixels = torch.from_numpy(padded_pixels(data, recipe.crop or 0)).to(device)
        self.labels = torch.tensor(data.train_labels, device=device)
        self.test_images = torch.tensor(np.asarray(data.test_images), device=device)
        plain, mirrored = pixel_grids(data.image_shape, recipe.crop or 0)
        self._plain = torch.tensor(plain, device=device)
        self._mirrored = torch.tensor(np.ascontiguousarray(mirrored), device=device) if recipe.flip else None
        self._shift = torch.tensor(data.shift, dtype=dtype, device=device)
        self._scale = torch.tensor(data.scale, dtype=dtype, device=device)

    def batch(self, corners: Tensor, flips: Tensor) -> Tensor:
        """The crops at these corners, normalised, NCHW (channels innermost in memory)."""
        grid = self._plain
        if self._mirrored is not None:
            grid = torch.where(flips[:, None, None].bool(), self._mirrored, grid)
        index = corners[:, None, None] + grid
        pixels = self.pixels[index.flatten()].unflatten(0, index.shape)
        return self.normalise(pixels)

    def normalise(self, images: Tensor) -> Tensor:
        """(pixel - shift) * scale, NHWC to NCHW without moving memory."""
        return ((images.to(self._shift.dtype) - self._shift) * self._scale).permute(0, 3, 1, 2)


class TorchEngine:
    """See :class:`trainers.loop.Engine`."""

    def __init__(
        self,
        architecture: Architecture,
        network: Network,
        recipe: Recipe,
        examples: Examples,
        classes: int,
        device: torch.device,
    ) -> None:
        self._architecture = architecture
        self._network = network
        self._recipe = recipe
        self._examples = examples
        self._classes = classes
        self._device = device

    def load(self, weights: dict[str, NDArray[Any]], momentum: dict[str, NDArray[Any]] | None) -> None:
        self._tensors = {name: self._place(value) for name, value in weights.items()}
        trained = [parameter for parameter in self._network.parameters if parameter.trainable]
        for parameter in trained:
            self._tensors[parameter.name].requires_grad_()
        groups = [
            {"params": [self._tensors[parameter.name] for parameter in trained if parameter.slow is slow], "slow": slow}
            for slow in (False, True)
        ]
        # PyTorch's SGD is the papers' update to the letter: v = m v + (g + wd w); w -= rate v.
        self._optimiser = torch.optim.SGD(
            [group for group in groups if group["params"]],
            lr=0.0,
            momentum=self._recipe.momentum,
            weight_decay=self._recipe.weight_decay,
            fused=True,
        )
        for parameter in trained:
            tensor = self._tensors[parameter.name]
            buffer = torch.zeros_like(tensor) if momentum is None else self._place(momentum[parameter.name])
            self._optimiser.state[tensor]["momentum_buffer"] = buffer.detach()

    def weights(self) -> dict[str, NDArray[Any]]:
        return {name: _array(tensor) for name, tensor in self._tensors.items()}

    def momentum(self) -> dict[str, NDArray[Any]]:
        return {
            name: _array(self._optimiser.state[tensor]["momentum_buffer"])
            for name, tensor in self._tensors.items()
            if tensor.requires_grad
        }

    def train(self, plan: EpochPlan, start: int, stop: int) -> Tensor:
        examples, corners, flips = (
            torch.from_numpy(values).to(self._device) for values in (plan.examples, plan.corners, plan.flips)
        )
        masks = {name: torch.from_numpy(mask).to(self._device) for name, mask in plan.masks.items()}
        labels = self._examples.labels[examples]
        losses = []
        for step in range(start, stop):
            rows = plan.rows(step)
            images = self._examples.batch(corners[rows], flips[rows])
            net = TorchOperations(self._tensors, {name: mask[rows] for name, mask in masks.items()})
            loss = F.cross_entropy(self._architecture(net, images, self._classes), labels[rows])
            self._optimiser.zero_grad()
            loss.backward()
            for group in self._optimiser.param_groups:
                group["lr"] = plan.rates[step] * (self._recipe.bias_lr_factor if group["slow"] else 1.0)
            self._optimiser.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    def losses(self, handle: Tensor) -> NDArray[np.float64]:
        return handle.double().cpu().numpy()

    def logits(self) -> NDArray[np.floating]:
        net = TorchOperations(self._tensors, None)
        with torch.inference_mode():
            parts = [
                self._architecture(net, self._examples.normalise(images), self._classes)
                for images in self._examples.test_images.split(EVALUATION_BATCH)
            ]
            return torch.cat(parts).cpu().numpy()

    def provenance(self) -> dict[str, Any]:
        cuda = self._device.type == "cuda"
        return {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self._device) if cuda else "cpu",
            "cuda": torch.version.cuda if cuda else None,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "onednn": torch.backends.mkldnn.enabled,
            "memory_format": "channels_last",
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "tf32": torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32,
        }

    def _place(self, value: NDArray[Any]) -> Tensor:
        tensor = torch.tensor(value, device=self._device)
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _array(tensor: Tensor) -> NDArray[Any]:
    """A copy in row-major order of the tensor's logical layout, which is the canonical one."""
    return np.array(tensor.detach().cpu().numpy(), order="C")
