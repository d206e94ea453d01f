"""Trainers, architectures and datasets that ship with the project: short name -> import path.

Anything else is given as an import path of the same form, with no registration.
"""

TRAINERS: dict[str, str] = {
    "torch": "trainers.torch:trainer",
    "tensorflow": "trainers.tensorflow:trainer",
}

ARCHITECTURES: dict[str, str] = {
    "dropnet": "trainers.architectures.dropnet:dropnet",
    "resnet6": "trainers.architectures.resnet:resnet6",
    "resnet10": "trainers.architectures.resnet:resnet10",
    "resnet14": "trainers.architectures.resnet:resnet14",
}

DATASETS: dict[str, str] = {
    "digits": "trainers.datasets.digits:digits",
    "mnist": "trainers.datasets.idx:mnist",
    "fashion-mnist": "trainers.datasets.idx:fashion_mnist",
    "cifar10": "trainers.datasets.cifar:cifar10",
}
