"""Determinism profiles of PyTorch: what a process must be started with."""

from __future__ import annotations

import getpass
import itertools
import os
import tempfile
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way for the library to compute the same mathematics."""

    threads: int | None = None
    """None: as many as the process was given."""
    channels_last: bool = True
    """Whether channels are innermost in memory, not columns."""
    onednn: bool = True
    isa: str = "default"
    """Vector instructions of PyTorch's own kernels: what the processor has, or ``avx2``."""
    compiled: bool = False
    """Whether training steps go through PyTorch's compiler, which needs one for C++."""


_THREADS, _ISAS = (None, 2, 3, 4), ("default", "avx2")
KERNELS: tuple[Kernel, ...] = (
    *(
        kernel
        for threads, channels_last, onednn, isa in itertools.product(_THREADS, (True, False), (True, False), _ISAS)
        if (kernel := Kernel(threads=threads, channels_last=channels_last, onednn=onednn, isa=isa)) != Kernel()
    ),
    # Last, so that only studies of many replicates need a compiler.
    *(Kernel(threads=threads, isa=isa, compiled=True) for threads, isa in itertools.product(_THREADS, _ISAS)),
)
"""The kernel environments of ``library=kernel``; replicate r takes entry r."""


def kernel_of(profile: str) -> Kernel:
    """The kernel environment of a profile; every profile but ``kernel-N`` has the default one."""
    kind, _, _ = profile.partition("+")
    return KERNELS[int(kind.removeprefix("kernel-"))] if kind.startswith("kernel-") else Kernel()


def environment(profile: str, threads: int, gpus: float) -> dict[str, str]:
    """Environment variables that are read when PyTorch or its libraries start, so that they cannot be set later.

    Args:
        profile: see :attr:`protocols.run.Run.profile`.
        threads: threads of the run.
        gpus: GPUs of the run; 0 hides them.
    """
    kernel = kernel_of(profile)
    count = str(kernel.threads or threads)
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OMP_WAIT_POLICY": "PASSIVE"}
    if kernel.isa == "avx2":
        variables |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
    if kernel.compiled:
        # Else the compiler keeps processes of its own, one for each core.
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        # Beside the processes' own temporary folders, so that what one has compiled serves the next.
        shared = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        variables["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", shared)
    if not profile.startswith("native"):
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # TF32 would round a change of one bit away, and the shell could force it on.
    variables |= {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    if not gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables
