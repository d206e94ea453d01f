"""``report``: the table, and files of it for papers, programs and readers."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli import output
from orchestrator.cli.cells import headline
from orchestrator.cli.options import Study, examples, study_options
from orchestrator.plan import Plan
from orchestrator.store import Store
from protocols.errors import UserError


@click.command(
    epilog=examples(
        "sweep.py report quickstart",
        "sweep.py report quickstart --only trainer=torch --html torch.html",
    )
)
@study_options
@click.option(
    "--html", type=click.Path(path_type=Path), help="Where the page goes; default report.html beside the other files."
)
def report(study: Study, html: Path | None) -> int:
    """Print the table; write it as HTML, CSV and LaTeX.

    The files go to STORE/report/, or to noisegrid-report/ where the store is no folder. Works on an unfinished study,
    too.
    """
    store = study.store()
    plan = study.plan(store)
    publish(study, plan, store, html)
    return output.corrupt_lines(plan.corrupt)


def publish(study: Study, plan: Plan, store: Store, html: Path | None = None) -> None:
    """Print the table and, once something is done, write the files.

    A page that was not asked for by name is left out, with a line that says why, where its extra is missing or broken.

    Args:
        study: what is reported.
        plan: its runs; those without a record count as missing.
        store: where the records are.
        html: where the page goes; None: beside the other files, see :func:`folder_of`.
    """
    from orchestrator.analysis import load
    from orchestrator.report import write_csv, write_html, write_latex, write_studies, write_table

    sweep = load(store, plan.protocol, plan.planned)
    click.echo(headline(study, plan) + "\n")
    write_table(sweep, output.console())
    if not plan.done:
        if html is not None:
            click.echo(f"Nothing is done yet, so {html} was not written.")
        return
    folder = folder_of(store)
    write_csv(sweep, folder / "table.csv")
    write_latex(sweep, folder / "table.tex")
    click.echo(f"\nThe table is also in {folder / 'table.csv'} and {folder / 'table.tex'}.")
    if further := write_studies(sweep, folder):
        click.echo(f"Every other number is in {', '.join(path.name for path in further)} beside it.")
    page = html or folder / "report.html"
    try:
        write_html(sweep, page, study.command)
    except (UserError, ImportError) as error:
        if html is not None:
            raise
        click.echo(f"There is no page: {error}")
    else:
        click.echo(f"The report is {page}.")


def folder_of(store: Store) -> Path:
    """Where reports go: into the store, or into the working directory where the store is no folder."""
    return Path("noisegrid-report") if "://" in store.url else Path(store.url) / "report"
