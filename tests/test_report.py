"""Reports: complete, readable by people and programs, self-contained, and honest about what they do not know."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import math
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

import orchestrator.report
from orchestrator.analysis import Sweep, load
from orchestrator.analysis.intervals import Estimate
from orchestrator.looks import Look
from orchestrator.report import studies, text, write_csv, write_html, write_latex, write_studies, write_table
from orchestrator.report.html import axis_limits
from orchestrator.report.table import ON_PAGE
from orchestrator.store import Store, open_store
from protocols.digest import tensor_digests
from protocols.errors import UserError
from protocols.perturbation import Perturbation
from protocols.protocol import Cell, DatasetSpec, Protocol
from protocols.quickstart import quickstart
from protocols.recipe import Recipe
from protocols.until import Until
from tests import factory


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two trainers; one complete, the other with a diverged run, failures and missing runs."""
    store = open_store(tmp_path_factory.mktemp("report") / "store", create=True)
    first, second = PLANNED[:32], PLANNED[32:]
    factory.fill(store, first)
    factory.fill(store, second[:20])
    store.commit(factory.diverged(second[20]))
    store.fail(factory.failure(second[21]))
    store.fail(factory.failure(second[0], outcome="error"))
    (other,) = factory.plan(sources=("shuffle",), replicates=40)[-1:]
    store.fail(factory.failure(other))  # of another study
    return store


PLANNED = factory.plan(replicates=4) + factory.plan(trainer="tensorflow", replicates=4)


@pytest.fixture(scope="module")
def sweep(store: Store) -> Sweep:
    return load(store, quickstart(), PLANNED)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """One group of two sources, two replicates each."""
    store = open_store(tmp_path_factory.mktemp("small") / "store", create=True)
    factory.fill(store, factory.plan(sources=("none", "init"), replicates=2))
    return load(store)


@pytest.fixture(scope="module")
def page(sweep: Sweep, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "new" / "report.html"
    write_html(sweep, path)
    return path.read_text(encoding="utf-8")


def printed(sweep: Sweep, width: int = 100) -> str:
    stream = io.StringIO()
    write_table(sweep, Console(file=stream, width=width, markup=False))
    return stream.getvalue()


@pytest.mark.parametrize("width", [100, 80])
def test_the_terminal_table_fits_and_loses_nothing(sweep: Sweep, width: int) -> None:
    output = printed(sweep, width)
    assert max(map(len, output.splitlines())) <= width
    assert "…" not in output
    words = re.sub(r"\s+", " ", output)
    assert words.index("held:") < words.index("accuracy"), "the verdict comes first"
    init = sweep.table().set_index(["trainer", "source"]).loc[("torch", "init")]
    for name in text.columns(sweep):
        assert text.number(init[name], name) in words, name
        assert text.number(init[f"{name}_high"], name) in words, name
    assert "library (order)" in words and "cuDNN" not in words
    assert "3/4" in words, "a cell with a missing run"
    assert "1 diverged run is left out of every measure" in words
    assert "Failed attempts: 2" in words


def test_the_terminal_table_of_an_empty_store(tmp_path: Path) -> None:
    assert "No records in" in printed(load(open_store(tmp_path / "nowhere")))
    assert "no replicate yet" in printed(load(tmp_path / "nowhere", planned=PLANNED))


def test_invalid_groups_are_marked_everywhere(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", create=True)
    for fake in factory.plan(replicates=2):
        factory.fill(store, [fake], **({} if fake.run.varies else {"final_digest": f"{fake.run.replicate:064d}"}))
    sweep = load(store)
    write_latex(sweep, tmp_path / "table.tex")
    write_html(sweep, tmp_path / "page.html")
    assert "INVALID" in printed(sweep) and "not held" in printed(sweep)
    assert "INVALID" in (tmp_path / "table.tex").read_text()
    assert "These rows are invalid" in (tmp_path / "page.html").read_text()


def test_csv_holds_the_table(sweep: Sweep, tmp_path: Path) -> None:
    write_csv(sweep, tmp_path / "deep" / "table.csv")
    read = pd.read_csv(tmp_path / "deep" / "table.csv", keep_default_na=False, na_values=[""])
    expected = sweep.table()
    assert list(read.columns) == list(expected.columns)
    for name in ("accuracy_sd", "disagreement", "correlation_low", "paper_cross_entropy_sd_se"):
        np.testing.assert_allclose(read[name], expected[name], rtol=1e-9)
    assert read["source"].tolist() == expected["source"].tolist(), "none stays a name"


def test_latex_is_a_balanced_tabular(sweep: Sweep, tmp_path: Path) -> None:
    write_latex(sweep, tmp_path / "table.tex")
    lines = (tmp_path / "table.tex").read_text(encoding="utf-8").splitlines()
    width = len(text.columns(sweep)) + 2
    assert r"\begin{tabular}{lr" + "r" * (width - 2) + "}" in lines
    assert lines[-1] == r"\end{tabular}" and lines[0].startswith("% needs \\usepackage{booktabs}")
    rows = [line for line in lines if line.endswith(r"\\")]
    assert len(rows) == 1 + 2 + 16
    for line in rows:
        columns = re.split(r"(?<!\\)&", line)
        spans = sum(int(span) for span in re.findall(r"\\multicolumn\{(\d+)\}", line))
        assert len(columns) == width or spans == width
        assert not re.search(r"(?<!\\)[%#]|[–−·]", line), "unescaped"
    for left, right in ("{}", "[]"):
        assert sum(line.count(left) for line in lines) == sum(line.count(right) for line in lines)


def test_latex_escapes() -> None:
    from orchestrator.report.files import latex

    assert latex("a_b & 5 % of #1 {x} ~ ^ \\") == (
        r"a\_b \& 5 \% of \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{}"
    )


class Outline(html.parser.HTMLParser):
    """What a browser would load, and whether tags are balanced."""

    VOID = frozenset({"meta", "br", "link", "img", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.headings: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        assert tag != "script"
        values = dict(attrs)
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            if values.get(name):
                self.loads.append(str(values[name]))
        if "id" in values:
            self.ids.append(str(values["id"]))
        if tag == "th":
            assert "scope" in values
        if tag == "svg":
            assert "aria-hidden" in values or (values.get("role") == "img" and values.get("aria-label"))
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_self_contained_and_well_formed(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert not outline.open
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in outline.loads)
    assert not re.search(r"@import|url\((?!#)", page), "the style sheet loads nothing"
    assert len(outline.ids) == len(set(outline.ids)), "no identifier twice"
    assert all(b - a <= 1 for a, b in zip(outline.headings, outline.headings[1:], strict=False))
    for load_ in outline.loads:
        if load_.startswith("#"):
            assert load_[1:] in outline.ids


def test_every_figure_follows_the_page_colours(page: str) -> None:
    figures = re.findall(r"<svg xmlns.*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 2 * (8 + 5), "of the groups, and of their sources against all"
    for figure in figures:
        ElementTree.fromstring(figure)
        assert "var(--ink)" in figure
        colours = set(re.findall(r"#[0-9a-f]{6}\b", figure.lower()))
        # Only the heat map has colours of its own: its legend's outline and the numbers on its own ground.
        assert colours <= {"#000000", "#fefefe"}, colours
    assert "prefers-color-scheme: dark" in page and "@media print" in page


def test_the_page_says_what_was_run_and_what_was_not(page: str, sweep: Sweep) -> None:
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert "52 of 64 runs finished" in words
    assert words.index("Was everything else held?") < words.index("What was run") < words.index("Accuracy SD, %")
    assert words.count("✓ Held") == 2
    for expected in (
        "a seeded permutation of the samples inside each batch",
        "everything at once: augment, dropout, init, library, shuffle (order",
        "all 4 replicates bit-identical",
        "1 diverged run is left out of every measure",
        "out of memory: tensorflow",
        "error: tensorflow",
        "the run has a record by now",
        "the run has no record yet",
        "OutOfMemoryError: tried to allocate 2.00 GiB",
        "had changed 4,800 of 4,810 weights; test examples classified otherwise: 7",
        "packages.torch",
        "2.13.0",
        f"noisegrid run quickstart --store {sweep.store.url}",
    ):
        assert expected in words, expected
    assert "cuDNN" not in words
    for fake in PLANNED:
        assert fake.run.id in page


def test_the_page_shows_the_table(page: str, sweep: Sweep) -> None:
    for measured in sweep.measured:
        for name in text.columns(sweep):
            interval = text.interval(measured.estimates[name], name)
            assert f"<b>{text.number(measured.estimates[name].value, name)}</b>" in page
            assert not interval or f"<small>{interval}</small>" in page


def test_pages_of_unfinished_studies(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", create=True)
    planned = factory.plan(replicates=2)
    factory.fill(store, planned[:9])
    write_html(load(store, planned=planned), tmp_path / "page.html", command="sweep.py run")
    assert "sweep.py run" in (tmp_path / "page.html").read_text()
    write_html(load(tmp_path / "nowhere", planned=planned), tmp_path / "page.html")
    assert "No replicate is finished yet" in (tmp_path / "page.html").read_text()
    write_html(load(open_store(tmp_path / "nowhere")), tmp_path / "page.html")


def test_text_from_records_is_escaped(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", create=True)
    planned = factory.plan(sources=("none", "init"), replicates=2, architecture="<script>alert(1)</script>")
    factory.fill(store, planned)
    store.fail({**factory.failure(planned[0]), "message": "<img src=x>"})
    write_html(load(store, planned=planned), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page and "<img" not in page and "&lt;script&gt;" in page


def test_the_same_records_give_the_same_page(small: Sweep, tmp_path: Path) -> None:
    for name in ("one.html", "two.html"):
        write_html(small, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_a_missing_extra_is_named(small: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = orchestrator.report.importlib.util.find_spec
    monkeypatch.setattr(
        orchestrator.report.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(UserError, match=re.escape("needs matplotlib: pip install noisegrid[report]")):
        write_html(small, tmp_path / "page.html")


def test_the_base_install_needs_neither_matplotlib_nor_jinja() -> None:
    script = "import sys, orchestrator.report; assert not {'matplotlib', 'jinja2', 'scipy.stats'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_file_in_the_way_is_one_clear_line(small: Sweep, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for write in (write_csv, write_latex, write_html):
        with pytest.raises(UserError, match=r"^cannot write .*/file/report: [^\n]*$"):
            write(small, tmp_path / "file" / "report")


def test_reports_leave_matplotlib_as_they_found_it(small: Sweep, tmp_path: Path) -> None:
    import matplotlib

    def parameters() -> dict[str, object]:
        # Looking at the backend would choose one.
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if not key.startswith("backend")}

    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path"}):
        before = parameters()
        write_html(small, tmp_path / "page.html")
        assert parameters() == before
    assert "font-size: 9px" in (tmp_path / "page.html").read_text(), "and ignore what the user has set"


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (0.0, "accuracy_sd", "0"),
        (0.004, "accuracy_sd", ".00"),
        (0.219, "accuracy_sd", ".22"),
        (12.345, "disagreement", "12.35"),
        (-0.519, "ensemble_gain", "−.52"),
        (-0.001, "ensemble_gain", ".00"),
        (0.8714, "correlation", ".871"),
        (1.0, "correlation", "1"),
        (0.99996, "correlation", "1.000"),
        (-0.8714, "correlation", "−.871"),
        (0.00725, "cross_entropy_sd", ".0073"),
        (97.0, "accuracy_mean", "97.00"),
        (1991324.2, "accuracy_sd", "2e+06"),
        (math.nan, "accuracy_sd", "–"),
    ],
)
def test_numbers(value: float, name: str, expected: str) -> None:
    assert text.number(value, name) == expected


def test_intervals_in_words() -> None:
    assert text.interval(Estimate(value=1, low=0.5, high=2), "accuracy_sd") == ".50–2.00"
    assert text.interval(Estimate(value=1, low=-0.5, high=2), "ensemble_gain") == "−.50 to 2.00"
    assert text.interval(Estimate(value=1, reason="one"), "accuracy_sd") == ""


def test_equal_notes_share_a_letter() -> None:
    marks, notes = text.footnotes([["x"], [], ["y", "x"]])
    assert marks == ["a", "", "a,b"] and notes == {"a": "x", "b": "y"}
    many, _ = text.footnotes([[str(number)] for number in range(28)])
    assert many[-2:] == ["aa", "ab"]


def test_axis_limits_show_every_value_and_tame_wild_intervals() -> None:
    wild = [Estimate(value=1.0, low=0.1, high=900.0), Estimate(value=2.0, low=1.5, high=2.5)]
    low, high = axis_limits(wild, 0.0)
    assert low == 0 and 4 < high < 6
    low, high = axis_limits([Estimate(value=0.9, low=0.85, high=0.95)], 1.0)
    assert low < 0.85 and high == 1
    low, high = axis_limits([Estimate(value=0.5, low=-0.2, high=1.2)], 0.0)
    assert low < -0.2 and high > 1.2
    assert axis_limits([Estimate(value=0.0)], 0.0)[0] < axis_limits([Estimate(value=0.0)], 0.0)[1]
    assert axis_limits([Estimate(value=math.nan)], 1.0)[1] == 1


@pytest.fixture(scope="module")
def rich_study(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Records that answer every question a report knows."""
    store = open_store(tmp_path_factory.mktemp("rich") / "store", create=True)
    rng = np.random.default_rng(0)
    accelerated = dataclasses.replace(RECIPE, cycles=3)
    for seed, recipe in ((0, RECIPE), (1, RECIPE), (0, accelerated)):
        planned = factory.plan(
            sources=("none", "init", "library", "all"), replicates=6, base_seed=seed, recipe=recipe, library="native"
        )
        for fake in planned:
            features = rng.standard_normal((8, 4))
            weights = rng.standard_normal(3)
            store.save_kept(fake.run.id, {"gram/stem": features @ features.T, "weights/w": weights})
            calm = {"name": "flip", "passes": 2, "accuracy": 0.9, "cross_entropy": 0.4}
            calm["logits"] = factory.logits(fake.run, noise=1.0)
            seconds = 2.0 + rng.random() if fake.run.library == "held" else 1.0
            digests = {"tensor_digests": tensor_digests({"w": weights})}
            factory.fill(
                store, [fake], noise=2.0, variants=[calm], kept=["layers", "weights"], train_seconds=seconds, **digests
            )
    for step in (0, 10, 100):
        label = f"onebit[step={step}]" if step else "onebit"
        for fake in factory.plan(sources=(label,), replicates=3, perturb=Perturbation(step=step), recipe=RECIPE):
            factory.fill(store, [fake], onebit_step=step, distance=3 - step / 50 + rng.random())
    until = Until(width=0.5, at_least=4, at_most=6)
    first = next(fake for fake in factory.plan(sources=("init",), replicates=1, recipe=RECIPE))
    look = {field.name: None for field in dataclasses.fields(Look)}
    look |= {"declaration": until.declaration, "cell": first.run.id, "group": first.run.group, "source": "init"}
    look |= {"look": 1, "looks": 2, "replicates": 4, "n": 3, "diverged": [1], "absent": [], "level": until.level}
    look |= {"sd": 0.7, "width": 0.5, "decision": "goes on", "reason": "an interval of an SD needs 4", "time": ""}
    store.record_look(until.declaration, first.run.id, 1, look)
    protocol = Protocol(name="rich", summary="rich", replicates=6, ensemble=2, cells=(CELL,), until=until)
    return load(store, dataclasses.replace(protocol, measures=("accuracy_sd", "disagreement")))


RECIPE = Recipe(epochs=6, batch_size=64, warmup_epochs=1.0, crop=1, flip=False)
CELL = Cell(source="init", architecture="dropnet", dataset=DatasetSpec(name="digits"), trainer="torch", recipe=RECIPE)


def test_every_question_that_records_answer_has_a_section(rich_study: Sweep, tmp_path: Path) -> None:
    assert [section.name for section in studies.sections(rich_study)] == list(studies.NAMES)
    write_html(rich_study, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    outline = Outline()
    outline.feed(page)
    assert not outline.open and set(studies.NAMES) <= set(outline.ids) and len(outline.ids) == len(set(outline.ids))
    output = printed(rich_study)
    for section in studies.sections(rich_study):
        assert section.title in page
        assert (section.title in output) == (section.name not in ON_PAGE)
        for table in section.tables:
            assert len({len(row) for row in table.rows} | {len(table.heads)}) == 1, section.name
            for row in table.rows:
                assert row[0][0] in page
                assert all(not value or f"<b>{value}</b>" in page for value, _ in row[1:])
    for figure in re.findall(r"<svg xmlns.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(figure)
    for title in ("Mean reduction of variability", "Alignment by layer", "L2 distance", "Accuracy SD against all"):
        assert title in page, title


@pytest.mark.parametrize("width", [100, 80])
def test_the_further_sections_fit_a_terminal(rich_study: Sweep, width: int) -> None:
    output = printed(rich_study, width)
    assert max(map(len, output.splitlines())) <= width and "…" not in output
    words = re.sub(r"\s+", "", output)
    row = rich_study.mitigations().iloc[1]
    assert text.number(row["reduction_high"], "reduction") in words and "pairedn=6" in words.replace(",", "")


def test_the_numbers_of_every_section_are_in_a_file(rich_study: Sweep, small: Sweep, tmp_path: Path) -> None:
    written = write_studies(rich_study, tmp_path)
    assert [path.name for path in written] == [f"{name}.csv" for name in studies.NAMES]
    read = pd.read_csv(tmp_path / "mitigations.csv", keep_default_na=False, na_values=[""])
    expected = rich_study.mitigations()
    assert list(read.columns) == list(expected.columns) and read["mitigation"].tolist()[0] == "none"
    np.testing.assert_allclose(read["reduction"], expected["reduction"].astype(float), rtol=1e-9)
    write_studies(small, tmp_path)
    assert not (tmp_path / "mitigations.csv").exists(), "what is left of an earlier report would mislead"


def test_a_verdict_is_written_as_a_sign(rich_study: Sweep) -> None:
    section = next(section for section in studies.sections(rich_study) if section.name == "shares")
    table = rich_study.shares()
    first = table[table["measure"] == "disagreement"].iloc[0]
    value, interval = section.tables[0].rows[0][2]
    assert value == f"{text.number(first['ratio'], 'ratio')} {studies.SIGNS[first['verdict']]}"
    assert interval == text.interval(studies.estimate(first, "ratio"), "ratio")
