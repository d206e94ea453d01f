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


KERNELS: tuple[Kernel, ...] = tuple(
    kernel
    for threads, onednn in itertools.product((None, 2, 3, 4), ("default", "avx2", "off"))
    if (kernel := Kernel(threads=threads, onednn=onednn)) != Kernel()
)
"""The kernel environments of ``library=kernel``; replicate r takes entry r."""


def kernel_of(profile: str) -> Kernel:
    """The kernel environment of a profile; every profile but ``kernel-N`` has the default one."""
    return KERNELS[int(profile.removeprefix("kernel-"))] if profile.startswith("kernel-") else Kernel()


def environment(profile: str, threads: int, gpus: float) -> dict[str, str]:
    """Environment variables that are read when TensorFlow or its libraries start, so that they cannot be set later.

    Args:
        profile: ``held``, ``native`` or ``kernel-N``.
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
    if profile == "native":
        # Whatever the user's shell says, released means released.
        variables |= {"TF_DETERMINISTIC_OPS": "0", "TF_CUDNN_DETERMINISTIC": "0"}
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables
