"""The epoch spool: what was appended is there, whatever happens to the process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from orchestrator.store import Spool
from protocols.contract import Epoch

ROOT = Path(__file__).parents[1]


def epoch(n: int) -> Epoch:
    return Epoch(
        epoch=n, learning_rate=0.1 / n, train_loss=1 / 3**n, test_loss=float("inf"), test_accuracy=0.5, seconds=1e-3
    )


def test_rows_are_there_at_once_and_after_closing(tmp_path: Path) -> None:
    with Spool(tmp_path / "new" / "folder", "run") as spool:
        assert spool.path == tmp_path / "new" / "folder" / "run.arrows"
        assert Spool.read(spool.path) == []
        for n in (1, 2, 3):
            spool.append(epoch(n))
            assert Spool.read(spool.path)[-1] == epoch(n)
    assert Spool.read(spool.path) == [epoch(1), epoch(2), epoch(3)]


def test_a_new_spool_replaces_the_old_one_and_is_deleted(tmp_path: Path) -> None:
    for n in (1, 2):
        with Spool(tmp_path, "run") as spool:
            spool.append(epoch(n))
    assert [row.epoch for row in Spool.read(spool.path)] == [2]
    spool = Spool(tmp_path, "run")
    spool.delete()
    assert list(tmp_path.iterdir()) == []
    assert Spool.read(spool.path) == []


def test_rows_survive_a_kill(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from orchestrator.store import Spool
from protocols.contract import Epoch
spool = Spool(Path(sys.argv[1]), "run")
for n in range(1, 101):
    spool.append(Epoch(epoch=n, learning_rate=.1, train_loss=1 / n, test_loss=2., test_accuracy=.5, seconds=1.))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    rows = Spool.read(tmp_path / "run.arrows")
    assert [(row.epoch, row.train_loss) for row in rows] == [(n, 1 / n) for n in range(1, 101)]


def test_a_stream_cut_anywhere_gives_the_rows_before_the_cut(tmp_path: Path) -> None:
    ends = {}
    with Spool(tmp_path, "run") as spool:
        for n in (1, 2, 3):
            spool.append(epoch(n))
            ends[n] = spool.path.stat().st_size
    data = spool.path.read_bytes()
    cut = tmp_path / "cut.arrows"
    for size in range(0, len(data) + 1, 7):
        cut.write_bytes(data[:size])
        assert [row.epoch for row in Spool.read(cut)] == [n for n, end in ends.items() if end <= size]
