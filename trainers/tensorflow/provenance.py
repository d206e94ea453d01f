"""What TensorFlow's bits depend on, as it is in force in this process."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from trainers.tensorflow.profiles import Kernel


def provenance(kernel: Kernel) -> dict[str, Any]:
    """Versions, device, determinism flags and threads."""
    gpus = tf.config.list_physical_devices("GPU")
    build = tf.sysconfig.get_build_info()
    return {
        "tensorflow": tf.__version__,
        "keras": tf.keras.__version__,
        "device": tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU") if gpus else "cpu",
        "cuda": build.get("cuda_version") if gpus else None,
        "cudnn": build.get("cudnn_version") if gpus else None,
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "inter_op_threads": tf.config.threading.get_inter_op_parallelism_threads(),
        "xla": kernel.xla,
        "op_determinism": is_op_determinism_enabled(),
        "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
    }
