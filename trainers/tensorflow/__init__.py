"""The TensorFlow trainer, as known without TensorFlow."""

from protocols.contract import Trainer
from trainers.network import trace
from trainers.tensorflow.profiles import KERNELS, environment

trainer = Trainer(
    name="tensorflow",
    numerics=1,
    framework="tensorflow",
    extra="tensorflow-cpu",
    train="trainers.tensorflow.train:train",
    network=trace,
    environment=environment,
    sources=frozenset({"init", "shuffle", "augment", "dropout", "library", "onebit"}),
    library_kinds=("order", "kernel", "native"),
    kernels=len(KERNELS),
)
