"""What PyTorch's bits depend on, as it is in force in this process."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from typing import Any

import torch

from trainers.torch.profiles import Kernel


def provenance(device: torch.device, kernel: Kernel) -> dict[str, Any]:
    """Versions, device, determinism flags and threads."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.enabled,
        "memory_format": "channels_last" if kernel.channels_last else "contiguous",
        "compiler": compiler_version() if kernel.compiled else None,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32,
    }


def compiler() -> str | None:
    """The C++ compiler that PyTorch's would use; None: there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def compiler_version() -> str | None:
    """The compiler in its own words."""
    path = compiler()
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]
