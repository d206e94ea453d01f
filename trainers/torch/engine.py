"""A network on one device, run by PyTorch: eager unless a kernel environment compiles it, no wait inside an epoch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from protocols.contract import PLAIN, Network, View
from protocols.recipe import Recipe
from trainers.asynchrony import Commits
from trainers.batches import EVALUATION_BATCH, EpochPlan
from trainers.network import Architecture
from trainers.operations import BN_MOMENTUM
from trainers.race import race
from trainers.torch.examples import Examples, Fetch
from trainers.torch.operations import TorchOperations
from trainers.torch.profiles import Kernel
from trainers.torch.provenance import provenance

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What one batch gives: of its mean loss the value and the gradient, and the batch-norm statistics."""

    loss: Tensor
    parts: list[Tensor | None]
    """By trainable tensor; None where the loss does not depend on it."""
    statistics: Tensors


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
        kernel: Kernel,
    ) -> None:
        self._architecture = architecture
        self._network = network
        self._trained = [parameter for parameter in network.parameters if parameter.trainable]
        self._recipe = recipe
        self._examples = examples
        self._classes = classes
        self._device = device
        self._kernel = kernel
        # Were shapes left open, the code of one batch size could later serve another, and a resumed run differ.
        self._loss = torch.compile(self._batch_loss, dynamic=False) if kernel.compiled else self._batch_loss
        self._waiting: dict[int, Gradient] = {}
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def load(
        self,
        weights: Mapping[str, NDArray[Any]],
        momentum: Mapping[str, NDArray[Any]] | None,
        averages: Mapping[str, NDArray[Any]] | None,
    ) -> None:
        self._waiting.clear()
        self._tensors = self._place(weights)
        self._averages = self._place(weights if averages is None else averages) if self._recipe.ema_decay else {}
        for parameter in self._trained:
            self._tensors[parameter.name].requires_grad_()
        groups = [
            {"params": [self._tensors[part.name] for part in self._trained if part.slow is slow], "slow": slow}
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
        buffers = {} if momentum is None else self._place(momentum)
        for parameter in self._trained:
            tensor = self._tensors[parameter.name]
            buffer = buffers.get(parameter.name, torch.zeros_like(tensor, requires_grad=False))
            self._optimiser.state[tensor]["momentum_buffer"] = buffer

    def weights(self) -> dict[str, NDArray[Any]]:
        return _arrays(self._tensors)

    def momentum(self) -> dict[str, NDArray[Any]]:
        state = self._optimiser.state
        return _arrays({part.name: state[self._tensors[part.name]]["momentum_buffer"] for part in self._trained})

    def averages(self) -> dict[str, NDArray[Any]]:
        return _arrays(self._averages)

    @torch.no_grad()
    def assign(self, name: str, value: NDArray[Any]) -> None:
        self._tensors[name].copy_(torch.tensor(value))

    def train(self, plan: EpochPlan, start: int, stop: int) -> Tensor:
        # Synchronous training is that of one worker, who reads fresh weights for every batch.
        batches, reads = (
            (range(plan.steps), range(plan.steps))
            if plan.commits is None
            else (plan.commits.batches.tolist(), plan.commits.reads.tolist())
        )
        due: dict[int, list[int]] = {step: [] for step in range(start, stop)}
        for batch, read in zip(batches, reads, strict=True):
            if read in due:
                due[read].append(batch)
        fetches = self._examples.batches(plan, [batch for step in due.values() for batch in step])
        masks, losses = self._masks(plan), []
        with self._timed():
            for step in range(start, stop):
                for batch in due[step]:
                    self._waiting[batch] = self._gradient(self._tensors, next(fetches), masks, plan.rows(batch))
                gradient = self._waiting.pop(batches[step])
                self._apply(gradient, plan.rates[step])
                losses.append(gradient.loss)
        return torch.stack(losses)

    def race(self, plan: EpochPlan, workers: int) -> tuple[NDArray[np.float64], Commits]:
        fetches, masks = self._examples.batches(plan, range(plan.steps)), self._masks(plan)
        losses: list[Tensor] = []

        def read(batch: int) -> tuple[Tensors, Fetch]:
            copies = {name: tensor.detach().clone() for name, tensor in self._tensors.items()}
            return copies, next(fetches)

        def gradient(batch: int, snapshot: tuple[Tensors, Fetch]) -> Gradient:
            copies, fetch = snapshot
            for parameter in self._trained:
                copies[parameter.name].requires_grad_()
            found = self._gradient(copies, fetch, masks, plan.rows(batch))
            # Only a gradient that is there can be committed: a GPU would otherwise race in the order of being asked.
            found.loss.item()
            return found

        def commit(step: int, gradient: Gradient) -> None:
            self._apply(gradient, plan.rates[step])
            losses.append(gradient.loss)

        with self._timed():
            commits = race(plan.steps, workers, read, gradient, commit)
        return self.losses(torch.stack(losses)), commits

    def device_seconds(self) -> float:
        if self._device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return sum(start.elapsed_time(stop) for start, stop in self._spans) / 1000

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Have the GPU's own clock time what is asked of it meanwhile."""
        if self._device.type != "cuda":
            yield
            return
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        stop.record()
        self._spans.append((start, stop))

    def losses(self, handle: Tensor) -> NDArray[np.float64]:
        return handle.double().cpu().numpy()

    @torch.inference_mode()
    def logits(self, view: View = PLAIN, weights: Mapping[str, NDArray[Any]] | None = None) -> NDArray[np.floating]:
        return torch.cat(list(self._tested(view, weights))).cpu().numpy()

    def logits_by_batch(self, weights: Mapping[str, NDArray[Any]] | None = None) -> Iterator[NDArray[np.floating]]:
        return (logits.cpu().numpy() for logits in self._tested(PLAIN, weights))

    @torch.inference_mode()
    def reestimated(self, weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if all(parameter.trainable for parameter in self._network.parameters):
            return dict(weights)
        tensors, totals, count = self._place(weights), dict[str, Tensor](), 0
        for inputs in self._examples.training(self._recipe.batch_size):
            found: Tensors = {}
            self._architecture(TorchOperations(tensors, None, statistics=found), self._laid(inputs), self._classes)
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + len(inputs) * value.double()
            count += len(inputs)
        means = {name: (total / count).to(tensors[name].dtype) for name, total in totals.items()}
        return _arrays({**tensors, **means})

    @torch.inference_mode()
    def activations(self, examples: int) -> Iterator[tuple[str, NDArray[np.floating]]]:
        observed: Tensors = {}
        net = TorchOperations(self._tensors, None, observed=observed)
        self._architecture(net, self._laid(next(self._examples.test(PLAIN, examples))), self._classes)
        for name in self._network.layers:
            yield name, observed.pop(name).flatten(1).cpu().numpy()

    def provenance(self) -> dict[str, Any]:
        return {**provenance(self._device, self._kernel), **self._examples.provenance()}

    @torch.inference_mode()
    def _tested(self, view: View, weights: Mapping[str, NDArray[Any]] | None) -> Iterator[Tensor]:
        """The logits of the test set, batch by batch."""
        net = TorchOperations(self._tensors if weights is None else self._place(weights), None)
        for inputs in self._examples.test(view, EVALUATION_BATCH):
            yield self._architecture(net, self._laid(inputs), self._classes).flatten(0, -2)

    def _batch_loss(self, tensors: Tensors, inputs: Tensor, labels: Tensor, masks: Tensors) -> tuple[Tensor, Tensors]:
        """The mean loss of one batch in training mode, and the batch's statistics."""
        statistics: Tensors = {}
        net = TorchOperations(tensors, masks, statistics=statistics)
        logits = self._architecture(net, self._laid(inputs), self._classes).flatten(0, -2)
        loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=self._recipe.label_smoothing)
        return loss, statistics

    def _gradient(self, tensors: Tensors, fetch: Fetch, masks: Tensors, rows: slice) -> Gradient:
        """The gradient of one batch at these weights."""
        inputs, labels = fetch()
        loss, statistics = self._loss(tensors, inputs, labels, {name: mask[rows] for name, mask in masks.items()})
        loss.backward()
        parts = []
        for parameter in self._trained:
            parts.append(tensors[parameter.name].grad)
            tensors[parameter.name].grad = None
        return Gradient(loss=loss.detach(), parts=parts, statistics=statistics)

    @torch.no_grad()
    def _apply(self, gradient: Gradient, rate: float) -> None:
        """One step of the server."""
        for parameter, part in zip(self._trained, gradient.parts, strict=True):
            self._tensors[parameter.name].grad = part
        for group in self._optimiser.param_groups:
            group["lr"] = rate * (self._recipe.bias_lr_factor if group["slow"] else 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()
        if gradient.statistics:
            running = [self._tensors[name] for name in gradient.statistics]
            torch._foreach_lerp_(running, list(gradient.statistics.values()), BN_MOMENTUM)
        if self._averages:
            current = [self._tensors[name] for name in self._averages]
            torch._foreach_lerp_(list(self._averages.values()), current, 1 - self._recipe.ema_decay)

    def _masks(self, plan: EpochPlan) -> Tensors:
        return {name: torch.from_numpy(mask).to(self._device) for name, mask in plan.masks.items()}

    def _place(self, values: Mapping[str, NDArray[Any]]) -> Tensors:
        return {name: self._laid(torch.tensor(value, device=self._device)) for name, value in values.items()}

    def _laid(self, tensor: Tensor) -> Tensor:
        """Images and convolutions in the memory format of the kernel environment."""
        if tensor.ndim != 4:
            return tensor
        if self._kernel.channels_last:
            return tensor.contiguous(memory_format=torch.channels_last)
        # A copy, since with one channel both formats are one to ``contiguous``, but not to convolutions.
        return tensor.clone(memory_format=torch.contiguous_format)


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Copies in row-major order of the tensors' logical layout, which is the canonical one."""
    return {name: np.array(tensor.detach().cpu().numpy(), order="C") for name, tensor in tensors.items()}
