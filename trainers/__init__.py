"""Trainers, architectures and datasets that ship with the project: short name -> import path.

Anything else is given as an import path of the same form, with no registration.
"""

TRAINERS: dict[str, str] = {
    "torch": "trainers.torch:trainer",
    "tensorflow": "trainers.tensorflow:trainer",
}

ARCHITECTURES: dict[str, str] = {
    "dropnet": "trainers.architectures.dropnet:dropnet",
    "linear": "trainers.architectures.shallow:linear",
    "hidden": "trainers.architectures.shallow:hidden",
    "hiddenconv": "trainers.architectures.shallow:hiddenconv",
    "mnistnet": "trainers.architectures.shallow:mnistnet",
    "resnet6": "trainers.architectures.resnet:resnet6",
    "resnet10": "trainers.architectures.resnet:resnet10",
    "resnet14": "trainers.architectures.resnet:resnet14",
    "resnet14x1_8": "trainers.architectures.resnet:resnet14x1_8",
    "resnet14x1_4": "trainers.architectures.resnet:resnet14x1_4",
    "resnet14x1_2": "trainers.architectures.resnet:resnet14x1_2",
    "resnet14x2": "trainers.architectures.resnet:resnet14x2",
    "resnet14x4": "trainers.architectures.resnet:resnet14x4",
    "resnet14x8": "trainers.architectures.resnet:resnet14x8",
    "resnet18": "trainers.architectures.resnet:resnet18",
    "resnet34": "trainers.architectures.resnet:resnet34",
    "resnet50": "trainers.architectures.resnet:resnet50",
    "imagenet_resnet18": "trainers.architectures.resnet:imagenet_resnet18",
    "imagenet_resnet34": "trainers.architectures.resnet:imagenet_resnet34",
    "imagenet_resnet50": "trainers.architectures.resnet:imagenet_resnet50",
    "vgg11": "trainers.architectures.vgg:vgg11",
    "shufflenet05": "trainers.architectures.shufflenet:shufflenet05",
    "shufflenet1": "trainers.architectures.shufflenet:shufflenet1",
    "lstm": "trainers.architectures.language:lstm",
    "qrnn": "trainers.architectures.language:qrnn",
}

DATASETS: dict[str, str] = {
    "digits": "trainers.datasets.digits:digits",
    "mnist": "trainers.datasets.idx:mnist",
    "fashion-mnist": "trainers.datasets.idx:fashion_mnist",
    "cifar10": "trainers.datasets.cifar:cifar10",
    "cifar100": "trainers.datasets.cifar:cifar100",
    "imagenet": "trainers.datasets.folder:imagenet",
    "ptb": "trainers.datasets.text:ptb",
}
