"""Determinism profiles of PyTorch: what a process must be started with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way for the library to compute the same mathematics."""

    threads: int | None = None
    """None: as many as the process was given."""
    onednn: bool = True
    isa: str = "default"
    """Vector instructions of PyTorch's own kernels: what the processor has, or ``avx2``."""


KERNELS: tuple[Kernel, ...] = tuple(
    kernel
    for threads, onednn, isa in itertools.product((None, 2, 3, 4), (True, False), ("default", "avx2"))
    if (kernel := Kernel(threads=threads, onednn=onednn, isa=isa)) != Kernel()
)
"""The kernel environments of ``library=kernel``; replicate r takes entry r."""


def kernel_of(profile: str) -> Kernel:
    """The kernel environment of a profile; every profile but ``kernel-N`` has the default one."""
    return KERNELS[int(profile.removeprefix("kernel-"))] if profile.startswith("kernel-") else Kernel()


def environment(profile: str, threads: int, gpus: float) -> dict[str, str]:
    """Environment variables that are read when PyTorch or its libraries start, so that they cannot be set later.

    Args:
        profile: ``held``, ``native`` or ``kernel-N``.
        threads: threads of the run.
        gpus: GPUs of the run; 0 hides them.
    """
    kernel = kernel_of(profile)
    count = str(kernel.threads or threads)
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OMP_WAIT_POLICY": "PASSIVE"}
    if kernel.isa == "avx2":
        variables |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
    if profile != "native":
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # TF32 would round a change of one bit away, and the shell could force it on.
    variables |= {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables
