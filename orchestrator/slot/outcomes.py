"""How an attempt ended that left no record, told from what was raised or printed. No framework is imported for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MEMORY_ERRORS = frozenset({"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"})
"""Names of exceptions of Python, PyTorch and TensorFlow that mean a want of memory, whatever they say."""


@dataclass(frozen=True)
class Pattern:
    """What an outcome is known by."""

    outcome: str
    text: str
    """A regular expression, in whatever case."""
    raised: str = ""
    """Only where an exception of this name says it."""


PATTERNS: tuple[Pattern, ...] = (
    # Memory comes first: on a GPU the want of it is an error of CUDA's, too.
    Pattern("out_of_memory", r"out of memory|CUDA_ERROR_OUT_OF_MEMORY"),
    Pattern("out_of_memory", r"(can't|cannot) allocate memory|std::bad_alloc"),
    Pattern("out_of_memory", r"OOM when allocating|failed to allocate memory"),
    Pattern("out_of_memory", r"CU(BLAS|DNN|SOLVER|FFT)_(STATUS_)?ALLOC_FAILED"),
    Pattern("hardware", r"uncorrectable (ECC|NVLink)|CUDA_ERROR_(ECC|NVLINK)_UNCORRECTABLE"),
    Pattern("hardware", r"CUDA.*illegal (memory access|address|instruction)|CUDA_ERROR_ILLEGAL_(ADDRESS|INSTRUCTION)"),
    Pattern("hardware", r"device-side assert|CUDA_ERROR_ASSERT"),
    Pattern("hardware", r"unspecified launch failure|CUDA_ERROR_LAUNCH_(FAILED|TIMEOUT)|the launch timed out"),
    Pattern("hardware", r"device(\(s\) is/are|s? (is|are)) busy or unavailable|CUDA_ERROR_DEVICE_UNAVAILABLE"),
    Pattern("hardware", r"hardware stack error|CUDA_ERROR_HARDWARE_STACK_ERROR"),
    Pattern("hardware", r"GPU is lost|fallen off the bus|NVML: (Driver/library version mismatch|GPU is lost)"),
    Pattern("hardware", r"failed to initialize NVML|unable to determine the device handle"),
    Pattern("hardware", r"no CUDA-capable device|no CUDA GPUs are available|CUDA_ERROR_NO_DEVICE"),
    Pattern("hardware", r"CUDA (driver initialization failed|unknown error)|CUDA error: unknown error"),
    Pattern("hardware", r"CU(BLAS|DNN|SOLVER|FFT)_(STATUS_)?(EXECUTION|EXEC)_FAILED"),
    Pattern("hardware", r"CU(BLAS|DNN|SOLVER)_STATUS_MAPPING_ERROR"),
    Pattern("hardware", r"(GPU|stream) sync failed|failed to (synchronize|query event)", raised="InternalError"),
    Pattern("hardware", r"(Blas \w+|cuDNN) launch fail(ed|ure)", raised="InternalError"),
)
"""In order: the first that fits decides."""


def error_outcome(error: BaseException) -> str:
    """``out_of_memory``, ``hardware`` or ``error``, by an exception or what it was raised from."""
    for each in _chain(error):
        names = {kind.__name__ for kind in type(each).__mro__}
        if names & MEMORY_ERRORS:
            return "out_of_memory"
        if (outcome := _outcome(str(each), names)) != "error":
            return outcome
    return "error"


def text_outcome(text: str) -> str:
    """``out_of_memory``, ``hardware`` or ``error``, by the last words of a process that was aborted."""
    return _outcome(text, {"InternalError"} if "InternalError" in text else set())


def _outcome(text: str, names: set[str]) -> str:
    for pattern in PATTERNS:
        if (not pattern.raised or pattern.raised in names) and re.search(pattern.text, text, re.IGNORECASE):
            return pattern.outcome
    return "error"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it was raised from, and so on."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
