"""The result table as files for programs (CSV) and for papers (LaTeX)."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.analysis.controls import NOT_HELD
from orchestrator.analysis.quantities import QUANTITIES
from orchestrator.analysis.sweep import Sweep
from orchestrator.report import studies, text
from protocols.errors import UserError
from protocols.until import percent

_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "·": r"$\cdot$",
    "–": "--",
    "−": "$-$",
}


def write_csv(sweep: Sweep, path: str | os.PathLike[str]) -> None:
    """Write :meth:`orchestrator.analysis.Sweep.table`, one row a cell; missing values are empty.

    Raises:
        UserError: the file cannot be written.
    """
    save(path, sweep.table().to_csv(index=False, float_format="%.10g", lineterminator="\n"))


def write_studies(sweep: Sweep, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the numbers of every further section of the report as NAME.csv, and delete those that are of none.

    Raises:
        UserError: a file cannot be written.
    """
    shown = [section.name for section in studies.sections(sweep)]
    for name in set(studies.NAMES) - set(shown):
        (Path(folder) / f"{name}.csv").unlink(missing_ok=True)
    for name in shown:
        table = studies.frame(sweep, name)
        save(Path(folder) / f"{name}.csv", table.to_csv(index=False, float_format="%.10g", lineterminator="\n"))
    return [Path(folder) / f"{name}.csv" for name in shown]


def write_latex(sweep: Sweep, path: str | os.PathLike[str]) -> None:
    """Write one ``tabular`` in the papers' layout, a block of rows for each group; it needs ``\\usepackage{booktabs}``.

    Raises:
        UserError: the file cannot be written.
    """
    names = text.columns(sweep)
    quantities = [QUANTITIES[name] for name in names]
    heads = [latex(quantity.title + (f" ({quantity.unit})" if quantity.unit else "")) for quantity in quantities]
    until = sweep.protocol.until if sweep.protocol else None
    looked = f" (accuracy SDs of cells that were looked at: {percent(until.level)})" if until else ""
    lines = [f"% needs \\usepackage{{booktabs}}; small print: 95 % intervals{looked}"]
    lines += [rf"\begin{{tabular}}{{lr{'r' * len(names)}}}", r"\toprule", _row(["Source", "$n$", *heads])]
    for group in sweep.groups["group"]:
        verdict = sweep.verdicts[group].verdict
        title = f"{sweep.group_title(group)}; control {verdict}{': INVALID' if verdict == NOT_HELD else ''}"
        lines += [r"\midrule", _row([rf"\multicolumn{{{len(names) + 2}}}{{l}}{{\itshape {latex(title)}}}"])]
        for cell, measured in zip(sweep.cells, sweep.measured, strict=True):
            if cell.group == group:
                row = [latex(cell.label), latex(text.count(cell))]
                for name in names:
                    estimate = measured.estimates[name]
                    value, interval = text.number(estimate.value, name), text.interval(estimate, name)
                    row.append(latex(value) + (rf" {{\scriptsize [{latex(interval)}]}}" if interval else ""))
                lines.append(_row(row))
    save(path, "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]))


def latex(value: str) -> str:
    """Text with everything escaped that LaTeX would take for more than text."""
    return "".join(_LATEX.get(character, character) for character in value)


def save(path: str | os.PathLike[str], content: str) -> None:
    """Write a text file, its folder too.

    Raises:
        UserError: it cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def _row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"
