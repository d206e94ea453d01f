"""The README is true: every verb stands in it, its files of examples work as written, its files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli.app import app, main
from protocols.load import load_protocol
from tests import factory

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def snippet(name: str) -> str:
    """The Python file that the README shows under that name."""
    return next(code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if code.startswith(f"# {name}"))


@pytest.mark.parametrize("verb", sorted(app.commands))
def test_every_verb_is_shown(verb: str) -> None:
    assert f"noisegrid {verb}" in README


def test_commands_in_the_table_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command line of the table, with ``plan`` in place of what would train."""
    monkeypatch.chdir(tmp_path)
    commands = [
        command for row in README.splitlines() if row.startswith("| ") for command in re.findall("`(.*?)`", row)
    ]
    commands = [command.split()[1:] for command in commands if command.startswith("noisegrid ")]
    assert len(commands) > 10
    for verb, *arguments in commands:
        app.commands[verb].make_context(verb, list(arguments))  # Every option exists and takes such a value.
        if verb in ("run", "check"):
            verb, arguments = "plan", without_options_of_launching(arguments)
        if verb == "status":
            arguments = [argument for argument in arguments if argument != "--follow"]  # Nothing would ever be done.
        result = CliRunner().invoke(app, [verb, *arguments])
        needs_records = verb in ("report", "replay", "logs", "compact", "verify", "export", "import")
        assert result.exit_code == 0 or needs_records, (verb, arguments, result.output)


def without_options_of_launching(arguments: list[str]) -> list[str]:
    """The arguments of ``run`` that ``plan`` takes, too."""
    planning = {name for parameter in app.commands["plan"].params for name in parameter.opts}
    launching = {name for parameter in app.commands["run"].params for name in parameter.opts} - planning
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument not in launching:
            kept.append(argument)
        skip = not skip and argument in launching
    return kept


def test_a_study_a_network_and_data_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("study.py", "nets.py", "blobs.py"):
        (tmp_path / name).write_text(snippet(name))
    assert len(load_protocol("./study.py:rates").cells) == 4
    assert main(["plan", "./study.py:rates"]) == 0
    assert main(["plan", "quickstart", "--set", "architecture=./nets.py:tiny"]) == 0
    assert main(["plan", "quickstart", "--set", "dataset=./blobs.py:blobs"]) == 0


def test_the_notebook_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from orchestrator.store import open_store

    factory.fill(open_store("results/", create=True), factory.plan(sources=("none", "init"), replicates=3))
    lines = next(code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "read_parquet" in code)
    exec(compile(lines, "README.md", "exec"), {})


def test_links_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)", README) if "://" not in target]
    assert targets and all((ROOT / target).exists() for target in targets), targets
