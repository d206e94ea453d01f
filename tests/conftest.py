"""Shared by all tests: the settings a run would have, made before any framework is imported, and real data."""

from __future__ import annotations

import os
import shutil
import tempfile

# Read when the frameworks and their libraries start.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TF_CPP_MIN_LOG_LEVEL="2",
    CUDA_VISIBLE_DEVICES="",
    CUBLAS_WORKSPACE_CONFIG=":4096:8",
)
# Every Ray that a test starts keeps its files here; a short path, since its sockets want one.
os.environ["RAY_TMPDIR"] = RAY_FOLDER = tempfile.mkdtemp(prefix="ng")
for name in ("NOISEGRID_PROTOCOL", "NOISEGRID_STORE", "NOISEGRID_GPUS_PER_RUN", "RAY_ADDRESS"):
    os.environ.pop(name, None)

from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

from orchestrator.slot.context import Settings  # noqa: E402
from orchestrator.slot.supervisor import Supervisor  # noqa: E402
from orchestrator.store import Store, open_store  # noqa: E402
from protocols.contract import Dataset  # noqa: E402
from protocols.protocol import DatasetSpec  # noqa: E402


def pytest_unconfigure() -> None:
    """Leave nothing of Ray's behind."""
    shutil.rmtree(RAY_FOLDER, ignore_errors=True)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data cache of the test session's own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def digits(cache: Path) -> Dataset:
    """All of scikit-learn's digits."""
    return _digits(cache, DatasetSpec(name="digits"))


@pytest.fixture(scope="session")
def few_digits(cache: Path) -> Dataset:
    """200 training and 100 test digits."""
    return _digits(cache, DatasetSpec(name="digits", train_size=200, test_size=100))


def _digits(cache: Path, spec: DatasetSpec) -> Dataset:
    from trainers.datasets import prepare
    from trainers.datasets.digits import digits

    return prepare(digits, spec, None, cache)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store", create=True)


@pytest.fixture
def mischief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder whose files make runs misbehave."""
    folder = tmp_path / "mischief"
    folder.mkdir()
    monkeypatch.setenv("NOISEGRID_FAKE", str(folder))
    return folder


@pytest.fixture
def supervise(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    """Makes supervisors that are closed at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    made: list[Supervisor] = []

    def supervise(*, patience: float = 3600.0, **settings: Any) -> Supervisor:
        made.append(Supervisor(Settings(**{"store": store.url, "checkpoint_every": 0} | settings), patience=patience))
        return made[-1]

    yield supervise
    for supervisor in made:
        supervisor.close()
