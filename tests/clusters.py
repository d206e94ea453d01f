"""A Ray cluster of several nodes with fake GPUs on this machine, sweeps on it as programs, and their processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos_study import LOG

ROOT = Path(__file__).parents[1]
PATIENCE = 600.0
"""Seconds after which something that should happen counts as not happening; far more than it takes."""
NODE = {"num_cpus": 2, "num_gpus": 2}  # Ray takes our word for it.


class Nodes:
    """The cluster. Node 0 is the head, which stays; the others may be killed and come back."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        self.nodes = [self._cluster.add_node(**NODE) for _ in range(count - 1)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        """Let a node join."""
        self.nodes.append(self._cluster.add_node(**NODE))

    def kill(self, number: int) -> None:
        """Kill a node's processes, as a power failure would."""
        self._cluster.remove_node(self.nodes.pop(number), allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def environment(cache: Path, **more: str) -> Iterator[Path]:
    """Variables of this process and all that it starts; gives a folder of the test's own, with a short path."""
    with tempfile.TemporaryDirectory(prefix="ng") as folder, pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        variables = {"RAY_TMPDIR": f"{folder}/ray", "TMPDIR": folder, "XDG_CACHE_HOME": str(cache)}
        # Half a minute would be a long time for a test to wait for a node that is gone.
        variables |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "5"}
        for name, value in (variables | {LOG: f"{folder}/log"} | more).items():
            patch.setenv(name, value)
        tempfile.tempdir = None
        try:
            yield Path(folder)
        finally:
            for pid in processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not processes())
            tempfile.tempdir = None


def start(study: str, store: Path, address: str, **options: Any) -> subprocess.Popen[str]:
    """A sweep as a program of its own, with its output in ``stdout``."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos_study", study, str(store), address, json.dumps(options)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def outcome(program: subprocess.Popen[str]) -> dict[str, Any]:
    """What a sweep printed at its end, which is waited for."""
    shown = program.communicate(timeout=PATIENCE)[0]
    assert program.returncode == 0, shown
    result: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return result


def processes(name: str = "") -> list[int]:
    """Processes of this test, by what their environment says and what their command holds."""
    mark = f"{LOG}={os.environ[LOG]}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                own = mark in (folder / "environ").read_bytes().split(b"\0")
                if own and name.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found


def workers() -> list[int]:
    """Training processes of this test; the parent of each is its slot."""
    return processes("orchestrator.slot.worker")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(condition: Callable[[], Any], program: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert program is None or program.poll() is None, "it ended by itself: " + program.communicate()[0]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
