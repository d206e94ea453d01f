"""Determinism profiles of TensorFlow: what a process must be started with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way for the library to compute the same mathematics."""

    threads: int | None = None
    """None: as many as the process was given."""
    onednn: str = "default"
    """oneDNN's kernels: for what the processor has (``default``), for ``avx2`` only, or ``off``."""
    xla: bool = False
    """Whether gradients are compiled by XLA."""


_LIBRARIES = (("default", False), ("avx2", False), ("off", False), ("default", True))
KERNELS: tuple[Kernel, ...] = tuple(
    kernel
    for threads, (onednn, xla) in itertools.product((None, 2, 3, 4), _LIBRARIES)
    if (kernel := Kernel(threads=threads, onednn=onednn, xla=xla)) != Kernel()
)
"""The kernel environments of ``library=kernel``; replicate r takes entry r."""


def kernel_of(profile: str) -> Kernel:
    """The kernel environment of a profile; every profile but ``kernel-N`` has the default one."""
    kind, _, _ = profile.partition("+")
    return KERNELS[int(kind.removeprefix("kernel-"))] if kind.startswith("kernel-") else Kernel()


def racing(profile: str) -> int:
    """How many gradients a process of this profile computes side by side."""
    _, _, workers = profile.partition("+")
    return int(workers or 1)


def environment(profile: str, threads: int, gpus: float) -> dict[str, str]:
    """Environment variables that are read when TensorFlow or its libraries start, so that they cannot be set later.

    Args:
        profile: see :attr:`protocols.run.Run.profile`.
        threads: threads of the run.
        gpus: GPUs of the run; 0 hides them.
    """
    kernel = kernel_of(profile)
    variables = {
        "OMP_NUM_THREADS": str(kernel.threads or threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # TF32 would round a change of one bit away, and the shell could force it on.
        "NVIDIA_TF32_OVERRIDE": "0",
        "TF_ENABLE_ONEDNN_OPTS": "0" if kernel.onednn == "off" else "1",
    }
    if kernel.onednn == "avx2":
        variables["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    if profile.startswith("native"):
        # Whatever the user's shell says, released means released.
        variables |= {"TF_DETERMINISTIC_OPS": "0", "TF_CUDNN_DETERMINISTIC": "0"}
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables
