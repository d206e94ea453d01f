"""From tables to what people read: the terminal, CSV, LaTeX and one HTML page."""

from __future__ import annotations

import importlib.util
import os

from orchestrator.analysis.sweep import Sweep
from orchestrator.report.files import write_csv, write_latex, write_studies
from orchestrator.report.table import write_table
from protocols.errors import UserError

__all__ = ["write_csv", "write_html", "write_latex", "write_studies", "write_table"]


def write_html(sweep: Sweep, path: str | os.PathLike[str], command: str | None = None) -> None:
    """Write a sweep's report as one self-contained HTML file.

    Args:
        sweep: what to report, finished or not.
        path: the file.
        command: what repeats the sweep, shown at the end; None: made from the protocol's name and the store's place.

    Raises:
        UserError: the extra ``report`` is not installed, or the file cannot be written.
    """
    for module in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"the HTML report needs {module}: pip install noisegrid[report]")
    from orchestrator.report import html

    html.write_html(sweep, path, command)
