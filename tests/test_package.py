"""The built wheel, used outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_works_away_from_the_repository(tmp_path: Path) -> None:
    # A copy, since building leaves files beside the sources.
    source = tmp_path / "source"
    for name in ("protocols", "trainers", "orchestrator"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("sweep.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("noisegrid-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    assert {"sweep.py", "orchestrator/report/report.html.j2", "protocols/py.typed"} <= set(names)
    assert not any(name.startswith(("tests/", "docs/")) for name in names)
    shown = subprocess.run(
        [sys.executable, "-c", "import orchestrator, sweep; print(orchestrator.__file__); sweep.main(['list'])"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert str(tmp_path / "installed") in shown.stdout and "quickstart" in shown.stdout
