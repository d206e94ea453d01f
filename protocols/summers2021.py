"""Summers & Dinneen, "Nondeterminism and Instability in Neural Network Optimization" (ICML 2021, arXiv 2103.04514).

One function a study, :func:`summers2021` for all of them together, and :func:`small` for the small form of any.
"""

from __future__ import annotations

from dataclasses import replace

from protocols.perturbation import Perturbation
from protocols.protocol import MEASURES, Cell, Protocol, grid
from protocols.recipe import Recipe
from protocols.small import shrunk
from protocols.small import small as cut_down

REFERENCE = (
    "C. Summers, M. J. Dinneen: Nondeterminism and Instability in Neural Network Optimization. "
    "ICML 2021, arXiv 2103.04514"
)

RECIPE = Recipe()
REPLICATION = replace(RECIPE, epochs=200)
SHALLOW = Recipe(learning_rate=0.04)
MNIST = replace(SHALLOW, crop=0, flip=False)
IMAGENET = Recipe(epochs=90, batch_size=256, learning_rate=0.1, warmup_epochs=5.0, weight_decay=1e-4)
LANGUAGE = Recipe(
    epochs=40,
    batch_size=64,
    learning_rate=1.0,
    warmup_epochs=1.0,
    weight_decay=1e-6,
    bias_lr_factor=1.0,
    crop=0,
    flip=False,
)

REPLICATES = 100
IMAGENET_REPLICATES = 20

SINGLE = ("init", "shuffle", "augment", "library", "onebit", "all")
"""Each source alone, and all together."""

SMALL_IMAGES = ("resnet6", "resnet10", "resnet18", "vgg11", "shufflenet05", "shufflenet1")
"""Beside resnet14, the networks for CIFAR-10."""
IMAGENET_NETWORKS = ("imagenet_resnet18", "imagenet_resnet34", "imagenet_resnet50")

CIFAR_VIEWS = ("flip", "crop25", "crop81", "flip-crop25", "flip-crop81")
MNIST_VIEWS = ("crop9",)
IMAGENET_VIEWS = ("crop9", "flip-crop9")

ADDED = (
    "a control is added, in which nothing varies, to show that the held sources are held",
    "augmentation is drawn for (seed, epoch, sample); the authors' depends on the number of loader workers",
    "SDs are unbiased (ddof 1) with jackknife intervals, pairwise means with jackknife intervals over models; "
    "the paper's own conventions stand beside them",
)
UNNORMALISED = (
    "networks without normalisation (linear, hidden, hiddenconv, mnistnet) train at a peak rate of 0.04, a tenth of "
    "the others', at which some of them diverge; theirs is not published"
)
MNIST_SETTINGS = "MNIST: nothing is published but the network and that images are not augmented; else as for CIFAR-10"
IMAGENET_SETTINGS = (
    "ImageNet: the usual 90 epochs in batches of 256 at a peak rate of 0.1 with 5 epochs of warm-up and a weight decay "
    "of 1e-4, since the paper's settings are not published with its code"
)
EVERY_SOURCE = "every source is asked of every network; the paper shows some of these rows"


def _study(
    name: str,
    summary: str,
    cells: tuple[Cell, ...],
    *deviations: str,
    replicates: int = REPLICATES,
    ensemble: int | None = None,
) -> Protocol:
    """What the paper's studies have in common."""
    return Protocol(
        name=f"summers2021-{name}" if name else "summers2021",
        summary=summary,
        cells=cells,
        replicates=replicates,
        control_replicates=2,
        library="native",
        # The paper compares the layers of its networks by CKA.
        keep=("layers",),
        ensemble=ensemble,
        reference=REFERENCE,
        deviations=(*ADDED, *deviations),
    )


def _cells(
    sources: tuple[str, ...], architectures: tuple[str, ...], dataset: str = "cifar10", recipe: Recipe = RECIPE
) -> tuple[Cell, ...]:
    return grid(sources=sources, architectures=architectures, datasets=(dataset,), trainers=("torch",), recipe=recipe)


def table1() -> Protocol:
    """The main table: ResNet-14 on CIFAR-10, seven rows of 100 models."""
    sources = ("init", "shuffle", "augment", "library", "shuffle+library", "shuffle+augment+library", "all")
    return _study(
        "table1",
        "the main table: ResNet-14 on CIFAR-10, seven sets of sources",
        _cells(sources, ("resnet14",)),
        "where it is run on MNIST, Fashion-MNIST or digits: crops with a padding of 1 pixel and no flips "
        "(the paper augments CIFAR-10 by crops with a padding of 4 and flips, and MNIST not at all)",
    )


def onebit() -> Protocol:
    """One bit of one weight, in the first layer or in the classifier, against a new initialisation and everything."""
    references = _cells(("init", "all"), ("resnet14",))
    (first,) = _cells(("onebit",), ("resnet14",))
    classifier = replace(first, perturb=Perturbation(tensor="last"))
    bias = replace(first, perturb=Perturbation(tensor="head.bias"), replicates=20)
    return _study(
        "onebit",
        "one bit of one weight (first convolution, classifier, classifier's bias) against init and all",
        (*references, first, classifier, bias),
        "no two replicates make the same change; of the classifier's bias there are but 20 (10 elements, up or down), "
        "so its row has 20 replicates",
    )


def instability() -> Protocol:
    """How little it takes to be unstable: one layer, one hidden layer, other depths, other widths."""
    sources = ("init", "onebit", "all")
    shallow = ("linear", "hidden", "hiddenconv")
    depths = ("resnet6", "resnet10", "resnet14", "resnet18")
    widths = tuple(f"resnet14x{factor}" for factor in ("1_8", "1_4", "1_2", "2", "4", "8"))
    return _study(
        "instability",
        "one bit against init and all, from a linear model to ResNet-18, and over widths",
        (*_cells(sources, shallow, recipe=SHALLOW), *_cells(sources, depths + widths)),
        "init and all stand beside one bit for every network; deep networks share one recipe",
        UNNORMALISED,
    )


def architectures() -> Protocol:
    """Other networks on CIFAR-10, and the published replication's ResNet-34 on CIFAR-100."""
    replication = _cells(("init", "shuffle", "onebit"), ("resnet34",), "cifar100", REPLICATION)
    return _study(
        "architectures",
        "each source on ResNet-6, -10, -18, VGG-11 and ShuffleNets; ResNet-34 on CIFAR-100",
        (*_cells(SINGLE, SMALL_IMAGES), *(replace(cell, replicates=25) for cell in replication)),
        EVERY_SOURCE,
        "ResNet-34 on CIFAR-100 (200 epochs, 25 models a row) is of the paper's published replication (ML "
        "Reproducibility Challenge 2021)",
    )


def mnist() -> Protocol:
    """A convolutional network on MNIST, without augmentation."""
    return _study(
        "mnist",
        "each source on MNIST: a small convolutional network, no augmentation",
        _cells(("init", "shuffle", "library", "onebit", "all"), ("mnistnet",), "mnist", MNIST),
        MNIST_SETTINGS,
        UNNORMALISED,
    )


def imagenet() -> Protocol:
    """ResNet-18, -34 and -50 on ImageNet, 20 models a row."""
    return _study(
        "imagenet",
        "each source on ImageNet: ResNet-18, -34 and -50",
        _few(_cells(SINGLE, IMAGENET_NETWORKS, "imagenet", IMAGENET)),
        IMAGENET_SETTINGS,
        EVERY_SOURCE,
        replicates=IMAGENET_REPLICATES,
    )


def mitigation() -> Protocol:
    """What reduces the variability: accelerated ensembling, test-time augmentation and the other candidates."""
    cells = (
        *_mitigations(("resnet14", *SMALL_IMAGES), "cifar10", RECIPE, CIFAR_VIEWS),
        *_mitigations(("mnistnet",), "mnist", MNIST, MNIST_VIEWS),
        *_few(_mitigations(IMAGENET_NETWORKS[:1], "imagenet", IMAGENET, IMAGENET_VIEWS)),
    )
    return _study(
        "mitigation",
        "what reduces variability: accelerated ensembling, test-time augmentation, averaged weights and more",
        cells,
        "added to the paper's methods: moving and stochastic averages of weights, label smoothing, a longer warm-up, a "
        "lower rate, and deep ensembles of 5",
        "accelerated ensembling outside CIFAR-10 has 5 cycles, too",
        MNIST_SETTINGS,
        UNNORMALISED,
        IMAGENET_SETTINGS,
        ensemble=5,
    )


def _mitigations(
    architectures: tuple[str, ...], dataset: str, base: Recipe, views: tuple[str, ...]
) -> tuple[Cell, ...]:
    """The base recipe comes first: the others are held against it. What trains no other network is evaluated on it."""
    recipes = (
        replace(base, views=views, ema_decay=0.999, swa_epochs=base.epochs // 4),
        replace(base, views=views, cycles=5),
        replace(base, label_smoothing=0.1),
        replace(base, warmup_epochs=5 * base.warmup_epochs),
        replace(base, learning_rate=base.learning_rate / 4),
    )
    return tuple(
        cell for name in architectures for recipe in recipes for cell in _cells(("all",), (name,), dataset, recipe)
    )


def factors() -> Protocol:
    """Each source on each network and each set of small images."""
    networks = ("resnet14", *SMALL_IMAGES)
    grey = tuple(name for name in networks if name != "vgg11")
    return _study(
        "grid",
        "each source x small network x CIFAR-10, CIFAR-100, MNIST, Fashion-MNIST",
        (
            *_cells(SINGLE, networks),
            *_cells(SINGLE, networks, "cifar100"),
            *_cells(SINGLE, grey, "mnist"),
            *_cells(SINGLE, grey, "fashion-mnist"),
        ),
        "a full cross of what the paper combines in part; MNIST and Fashion-MNIST are augmented here by crops with a "
        "padding of 1 pixel, so that augment varies everywhere",
    )


def language() -> Protocol:
    """Language models on Penn Treebank, with dropout as a source."""
    study = _study(
        "language",
        "each source on language: a small LSTM and a QRNN on Penn Treebank or any text file",
        _cells(("init", "shuffle", "dropout", "onebit", "all"), ("lstm", "qrnn"), "ptb", LANGUAGE),
        "only the network (a QRNN) and the dataset are the paper's: sizes, dropout of 0.2 and the recipe are this "
        "project's, since the paper's code has no language experiment; windows of text start from a zero state",
    )
    return replace(study, measures=(*MEASURES, "perplexity_sd"))


STUDIES = (table1, onebit, instability, architectures, mnist, imagenet, mitigation, factors, language)


def summers2021() -> Protocol:
    """All studies together; what several of them ask for is trained once."""
    studies = [study() for study in STUDIES]
    deviations = dict.fromkeys(text for study in studies for text in study.deviations if text not in ADDED)
    return _study(
        "",
        "all studies of the paper together",
        tuple(dict.fromkeys(cell for study in studies for cell in study.cells)),
        *deviations,
        ensemble=5,
    )


LARGE = ("resnet14x2", "resnet14x4", "resnet18", "resnet34", "vgg11", "shufflenet05", "shufflenet1")
"""Networks that the small forms train on less."""

SMALL_REPLICATES = {
    "onebit": 10,
    "mnist": 10,
    "instability": 4,
    "architectures": 3,
    "grid": 3,
    "imagenet": 2,
}
"""By study; the others have 8."""


def small(protocol: Protocol) -> Protocol:
    """The small form of a study: mostly 20 epochs of 2,000 images of 16x16, at the full form's peak rate."""
    study = protocol.name.removeprefix("summers2021-")
    # Ensembles small enough that a few replicates make several.
    ensemble = {"ensemble": 2} if protocol.ensemble else {}
    return cut_down(protocol, _small_cell, replicates=SMALL_REPLICATES.get(study, 8), **ensemble)


def _small_cell(cell: Cell) -> Cell | None:
    mitigates = cell.recipe not in (RECIPE, REPLICATION, SHALLOW, MNIST, IMAGENET, LANGUAGE)
    if cell.architecture == "resnet14x8" or (mitigates and cell.architecture not in ("resnet14", "mnistnet")):
        return None
    if mitigates and cell.dataset.name == "cifar10":
        # Views cost more here than training does: fewer of them, of fewer images.
        views = tuple(view for view in cell.recipe.views if not view.endswith("crop81"))
        recipe = replace(_short(cell.recipe, epochs=20, batch_size=128), views=views)
        return replace(cell, dataset=shrunk(cell.dataset, test_size=500), recipe=recipe)
    if cell.dataset.name in ("imagenet", "ptb"):
        return replace(cell, dataset=shrunk(cell.dataset), recipe=_short(cell.recipe, epochs=5, batch_size=32))
    if cell.architecture in LARGE:
        dataset = shrunk(cell.dataset, train_size=400, test_size=500)
        return replace(cell, dataset=dataset, recipe=_short(cell.recipe, epochs=5, batch_size=32))
    return replace(cell, dataset=shrunk(cell.dataset), recipe=_short(cell.recipe, epochs=20, batch_size=128))


def _short(recipe: Recipe, epochs: int, batch_size: int) -> Recipe:
    """A recipe over fewer epochs, with all that is counted in epochs shortened along."""
    return replace(
        recipe,
        epochs=epochs,
        batch_size=batch_size,
        warmup_epochs=recipe.warmup_epochs / 3,
        swa_epochs=recipe.swa_epochs * epochs // recipe.epochs,
        ema_decay=recipe.ema_decay and 0.98,
    )


def _few(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    return tuple(replace(cell, replicates=IMAGENET_REPLICATES) for cell in cells)
