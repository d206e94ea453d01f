"""How an attempt ended, told from what was raised or printed."""

from __future__ import annotations

import pytest

from orchestrator.slot.outcomes import MEMORY_ERRORS, PATTERNS, error_outcome, text_outcome


def raised(name: str, text: str, *, base: type[Exception] = RuntimeError) -> Exception:
    """An exception of a framework, known by its name alone."""
    error: Exception = type(name, (base,), {})(text)
    return error


SAID = [
    ("out_of_memory", "RuntimeError", "CUDA out of memory. Tried to allocate 20.00 MiB"),
    ("out_of_memory", "AcceleratorError", "CUDA error: out of memory"),
    ("out_of_memory", "RuntimeError", "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ("out_of_memory", "OSError", "[Errno 12] Cannot allocate memory"),
    ("out_of_memory", "RuntimeError", "std::bad_alloc"),
    ("out_of_memory", "InternalError", "OOM when allocating tensor with shape[1024,1024]"),
    ("out_of_memory", "InternalError", "Failed to allocate memory for a stream"),
    ("out_of_memory", "RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("out_of_memory", "RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("hardware", "AcceleratorError", "CUDA error: uncorrectable ECC error encountered"),
    ("hardware", "InternalError", "CUDA_ERROR_ECC_UNCORRECTABLE"),
    ("hardware", "RuntimeError", "CUDA error: uncorrectable NVLink error detected during the execution"),
    ("hardware", "AcceleratorError", "CUDA error: an illegal memory access was encountered"),
    ("hardware", "AcceleratorError", "CUDA error: an illegal instruction was encountered"),
    ("hardware", "InternalError", "could not synchronize on CUDA context: CUDA_ERROR_ILLEGAL_ADDRESS"),
    ("hardware", "AcceleratorError", "CUDA error: device-side assert triggered"),
    ("hardware", "RuntimeError", "CUDA error: unspecified launch failure"),
    ("hardware", "RuntimeError", "CUDA error: the launch timed out and was terminated"),
    ("hardware", "InternalError", "error unloading: CUDA_ERROR_LAUNCH_FAILED"),
    ("hardware", "AcceleratorError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ("hardware", "RuntimeError", "CUDA error: all CUDA-capable devices are busy or unavailable"),
    ("hardware", "RuntimeError", "CUDA error: hardware stack error"),
    ("hardware", "RuntimeError", "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost."),
    ("hardware", "RuntimeError", "NVRM: GPU at PCI:0000:3b:00: GPU has fallen off the bus"),
    ("hardware", "RuntimeError", "NVML: Driver/library version mismatch"),
    ("hardware", "RuntimeError", "Failed to initialize NVML: Unknown Error"),
    ("hardware", "RuntimeError", "No CUDA GPUs are available"),
    ("hardware", "RuntimeError", "CUDA error: no CUDA-capable device is detected"),
    ("hardware", "RuntimeError", "CUDA driver initialization failed, you might not have a CUDA gpu."),
    ("hardware", "RuntimeError", "CUDA unknown error - this may be due to an incorrectly set up environment"),
    ("hardware", "RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ("hardware", "RuntimeError", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
    ("hardware", "RuntimeError", "cuFFT error: CUFFT_EXEC_FAILED"),
    ("hardware", "RuntimeError", "cuDNN error: CUDNN_STATUS_MAPPING_ERROR"),
    ("hardware", "InternalError", "GPU sync failed"),
    ("hardware", "InternalError", "Failed to query event"),
    ("hardware", "InternalError", "Blas GEMM launch failed : a.shape=(128, 784)"),
    ("hardware", "InternalError", "cuDNN launch failure : input shape ([64,3,32,32])"),
    ("error", "ValueError", "shapes do not match"),
    ("error", "ValueError", "GPU sync failed"),
    ("error", "RuntimeError", "an illegal memory access"),
    ("error", "RuntimeError", "cuDNN error: CUDNN_STATUS_BAD_PARAM"),
]


@pytest.mark.parametrize(("outcome", "name", "text"), SAID)
def test_what_was_said_decides(outcome: str, name: str, text: str) -> None:
    assert error_outcome(raised(name, text)) == outcome


def test_every_pattern_is_needed() -> None:
    """Of what is said above, each knows something that no other knows."""
    for pattern in PATTERNS:
        others = tuple(each for each in PATTERNS if each != pattern)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("orchestrator.slot.outcomes.PATTERNS", others)
            assert any(error_outcome(raised(name, text)) != outcome for outcome, name, text in SAID), pattern


@pytest.mark.parametrize("name", sorted(MEMORY_ERRORS))
def test_some_names_mean_memory_whatever_is_said(name: str) -> None:
    assert error_outcome(raised(name, "")) == "out_of_memory"
    assert error_outcome(type("Own", (type(raised(name, "")),), {})("no room")) == "out_of_memory"


def test_what_an_error_was_raised_from_counts() -> None:
    try:
        try:
            raise raised("AcceleratorError", "CUDA error: unspecified launch failure")
        except RuntimeError as error:
            raise ValueError("the step failed") from error
    except ValueError as error:
        assert error_outcome(error) == "hardware"
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("a mistake") from None
    except ValueError as error:
        assert error_outcome(error) == "error"


def test_the_last_words_of_a_process() -> None:
    assert text_outcome("I starting\nF cuda_event.cc:28] CUDA_ERROR_ILLEGAL_ADDRESS\n") == "hardware"
    assert text_outcome("terminate called after throwing an instance of 'std::bad_alloc'") == "out_of_memory"
    assert text_outcome("InternalError: GPU sync failed") == "hardware"
    assert text_outcome("GPU sync failed") == text_outcome("") == "error"
