"""The accelerators of this machine, found without any framework."""

from __future__ import annotations

import functools
import os
import re
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
    return _uuid(os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip() or "0")


def place(host: str, device: str) -> str:
    """Names a device, as :func:`device` gives it, among those of all machines; fit for a file's name."""
    unique = device.startswith(("GPU-", "MIG-"))
    return re.sub(r"[^A-Za-z0-9-]", "-", device if unique else f"{host}-{device}")


def model() -> str:
    """The model of this process's first GPU; ``GPU`` where the driver names none."""
    return _query(os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip() or "0", "name") or "GPU"


@functools.cache
def _uuid(index: str) -> str:
    return _query(index, "uuid") or f"GPU {index}"


def _query(index: str, what: str) -> str:
    """One property of a GPU, by its number or UUID; empty where the driver does not tell."""
    query = ["nvidia-smi", f"--id={index}", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (subprocess.SubprocessError, OSError):
        return ""


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
