"""The TensorFlow trainer, as known without TensorFlow."""

from protocols.contract import Trainer
from trainers.network import trace
from trainers.tensorflow.profiles import KERNELS, environment

trainer = Trainer(
    name="tensorflow",
    numerics=2,
    framework="tensorflow",
    extra="tensorflow-cpu",
    train="trainers.tensorflow.train:train",
    evaluate="trainers.tensorflow.train:evaluate",
    network=trace,
    environment=environment,
    sources=frozenset({"init", "shuffle", "augment", "dropout", "async", "library", "onebit", "hardware"}),
    library_kinds=("order", "kernel", "native"),
    kernels=len(KERNELS),
)
