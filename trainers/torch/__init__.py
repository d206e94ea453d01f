"""The PyTorch trainer, as known without PyTorch."""

from protocols.contract import Trainer
from trainers.network import trace
from trainers.torch.profiles import KERNELS, environment

trainer = Trainer(
    name="torch",
    numerics=2,
    framework="torch",
    extra="torch",
    train="trainers.torch.train:train",
    evaluate="trainers.torch.train:evaluate",
    network=trace,
    environment=environment,
    sources=frozenset({"init", "shuffle", "augment", "dropout", "library", "onebit", "async", "hardware"}),
    library_kinds=("order", "kernel", "native"),
    kernels=len(KERNELS),
)
