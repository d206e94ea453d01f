"""Where a run's numbers come from: code, packages, machine, and the fingerprint within which bits are promised."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator import devices
from protocols.run import canonical

PACKAGES = (
    "noisegrid numpy pyarrow ray scikit-learn torch tensorflow tensorflow-cpu keras ml-dtypes "
    "nvidia-cudnn-cu12 nvidia-cudnn-cu13 nvidia-cublas-cu12 nvidia-cublas triton"
).split()

NUMERIC_VARIABLES = (
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS OPENBLAS_CORETYPE NPY_DISABLE_CPU_FEATURES "
    "ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA MKL_CBWR MKL_ENABLE_INSTRUCTIONS "
    "TF_ENABLE_ONEDNN_OPTS TF_XLA_FLAGS XLA_FLAGS TF_DETERMINISTIC_OPS TF_CUDNN_DETERMINISTIC TF_CUDNN_USE_AUTOTUNE "
    "CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
).split()
"""Environment variables that decide bits, and so belong to the fingerprint."""

OTHER_VARIABLES = ("OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that are recorded only."""

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "flax")
"""Names under which a trainer's part of a provenance gives the version of what it computes with."""

ISA = frozenset(
    "sse4_2 fma avx avx2 avx_vnni avx512f avx512dq avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 asimd asimddp bf16 i8mm sve sve2".split()
)
"""Processor flags by which numerical libraries choose their kernels."""


@functools.cache
def machine() -> dict[str, Any]:
    """What is the same for every run of this process: code, packages, operating system, processor, GPUs."""
    cpu, flags = _processor()
    return {
        "git": _git(Path(__file__).resolve().parents[1]),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu,
        "isa": sorted(flags & ISA),
        "cores": os.cpu_count(),
        "host": socket.gethostname(),
        "gpus": _gpus(),
    }


def provenance(trainer: Mapping[str, Any], between_runs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything known about where a run was trained; call it in the process that trained it.

    Args:
        trainer: the trainer's own part (:attr:`protocols.contract.Outcome.provenance`).
        between_runs: what came of the command before the run, where there is one.
    """
    environment = {name: os.environ[name] for name in (*NUMERIC_VARIABLES, *OTHER_VARIABLES) if name in os.environ}
    between = {} if between_runs is None else {"between_runs": dict(between_runs)}
    return {**machine(), "trainer": dict(trainer), "environment": environment, **between}


def fingerprint(provenance: Mapping[str, Any]) -> str:
    """A short hash of the parts of a provenance that bits depend on; equal runs have equal bits within one fingerprint.

    These are the versions of the framework and of NumPy, device model, threads and determinism flags (the trainer's
    part), the processor's model and vector instructions, and the environment variables of ``NUMERIC_VARIABLES``.
    """
    decisive = {
        "trainer": provenance["trainer"],
        "numpy": np.__version__,
        "cpu": provenance["cpu"],
        "isa": provenance["isa"],
        "environment": {name: value for name, value in provenance["environment"].items() if name in NUMERIC_VARIABLES},
    }
    return hashlib.sha256(canonical(decisive).encode()).hexdigest()[:16]


def hardware(provenance: Mapping[str, Any]) -> str:
    """The hardware class of a provenance in words: GPU model, driver, CUDA and cuDNN, and the framework's version.

    A CPU is a CPU, whatever its model: the fingerprint tells CPUs apart. Nor do threads and switches count, which the
    ``library`` source may vary.
    """
    trainer = provenance["trainer"]
    device = str(trainer.get("device", "cpu"))
    parts = [device]
    if device != "cpu":
        # GPUs are listed as "name, memory, driver", and a machine has one driver.
        driver = provenance["gpus"][0].rpartition(", ")[2] if provenance["gpus"] else None
        versions = [("driver", driver), ("CUDA", trainer.get("cuda")), ("cuDNN", trainer.get("cudnn"))]
        parts += [f"{name} {version}" for name, version in versions if version]
    return ", ".join(parts + [f"{name} {trainer[name]}" for name in FRAMEWORKS if name in trainer])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict[str, Any] | None:
    """The commit of the working tree whose top is ``root``; None where that is no working tree."""
    top = _output("git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD").splitlines()
    if len(top) != 2 or Path(top[0]).resolve() != root:
        return None
    # Untracked files do not count, as for git describe --dirty: results and notes often lie in the tree.
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {"commit": top[1], "dirty": bool(changes)}


def _processor() -> tuple[str, frozenset[str]]:
    """The processor's model with its family, model and stepping numbers (clouds hide its name), and its flags."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    name = facts.get("model name", platform.machine())
    numbers = "/".join(facts[key] for key in ("cpu family", "model", "stepping") if key in facts)
    return f"{name} ({numbers})" if numbers else name, frozenset(facts.get("flags", facts.get("Features", "")).split())


def _gpus() -> list[str]:
    """The GPUs of this machine, each as ``name, memory, driver``."""
    try:
        return devices.gpus()
    except OSError:
        return []


def _output(*command: str) -> str:
    """What a command prints; empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (subprocess.SubprocessError, OSError):
        return ""
