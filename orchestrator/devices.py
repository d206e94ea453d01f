"""The accelerators of this machine, found without any framework."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA device that CUDA_VISIBLE_DEVICES does not hide."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").partition(",")[0].strip() in ("", "-1"):
        return False
    return Path("/dev/nvidia0").exists() or any(Path("/proc/driver/nvidia/gpus").glob("*"))


def device(gpus: float) -> str:
    """Which device this process has: the UUID of its first GPU, ``GPU N`` where the driver names none, or ``cpu``."""
    if not gpus:
        return "cpu"
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip() or "0"
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (subprocess.SubprocessError, OSError):
        answer = ""
    return answer or f"GPU {index}"


def cores(share: float) -> int:
    """CPU cores that go with so many of this machine's GPUs, at least 1."""
    try:
        present = len(gpus())
    except OSError:
        present = 0
    return max(1, int((os.cpu_count() or 1) * share / present)) if present else 1


def gpus() -> list[str]:
    """Each GPU as ``name, memory, driver``; empty where there is none.

    Raises:
        OSError: there is a device, but ``nvidia-smi`` is missing or fails.
    """
    if not has_gpu():
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(f"nvidia-smi failed: {error}") from error
    return answer.stdout.strip().splitlines()
