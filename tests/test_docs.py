"""The documents are true: links lead somewhere, commands are understood, all that has a name is explained."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator import catalog
from orchestrator.analysis import Sweep
from orchestrator.analysis.sweep import TABLE
from orchestrator.cli.app import app
from orchestrator.report import studies
from protocols.load import PROTOCOLS
from protocols.perturbation import Perturbation
from protocols.protocol import ISOLATIONS, KEEP, DatasetSpec
from protocols.recipe import VIEWS
from protocols.sources import ASYNCHRONIES, LIBRARY_KINDS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md")) + [ROOT / "cluster" / "README.md"]
TEXT = {page.stem: page.read_text() for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_commands_of_the_studies_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\|.*`noisegrid (plan [^`]+)` \|$", TEXT["studies"], re.MULTILINE)
    assert len(commands) > 15
    for command in commands:
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, (command, result.output)


def test_every_study_choice_and_setting_is_explained() -> None:
    full = [name for name in PROTOCOLS if not name.endswith("-small")]
    perturb = [f"perturb.{name}" for name in vars(Perturbation())]
    for name in (*full, *LIBRARY_KINDS, *KEEP, *VIEWS, *perturb):
        assert f"`{name}`" in TEXT["studies"], name
    for name in (*ASYNCHRONIES, *ISOLATIONS):
        assert name in TEXT["studies"] + TEXT["holding"], name
    for name in studies.NAMES:
        assert f"`{name}.csv`" in TEXT["studies"], name


def test_every_number_is_explained() -> None:
    tables = [name for name, method in inspect.getmembers(Sweep, inspect.isfunction) if not name.startswith("_")]
    for name in set(tables) - {"notes", "labels", "arrays", "group_title"}:
        assert f"sweep.{name}(" in TEXT["measures"], name
    ends = ("_low", "_high", "_se")
    known = [
        name for name in TABLE[5:] if not name.endswith(ends) and name not in ("notes", "group", "base_seed", "recipe")
    ]
    for name in known:
        assert f"`{name}`" in TEXT["measures"], name


def test_every_dataset_and_its_settings_are_explained() -> None:
    settings = [f"dataset.{name}" for name in vars(DatasetSpec(name="")) if name != "name"]
    for name in (*catalog.names("dataset"), *settings):
        assert f"`{name}`" in TEXT["data"], name
