"""The verbs put together, and the one way in which errors end: a single line and exit code 2."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence

import click

from orchestrator.cli.logs import logs
from orchestrator.cli.looking import doctor, list_, show
from orchestrator.cli.planning import plan
from orchestrator.cli.progress import status
from orchestrator.cli.replaying import replay
from orchestrator.cli.reporting import report
from orchestrator.cli.storing import compact, export, import_, verify
from orchestrator.cli.training import INTERRUPTED, check, run
from protocols.errors import UserError, unknown
from protocols.load import PROTOCOLS

MISTAKE = 2
"""Exit code of a user's mistake."""

# What the operating system says no to because of what the user asked for; any other OSError is a defect.
_REFUSALS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.ENAMETOOLONG,
    }
)


class _Verbs(click.Group):
    """A group that suggests the nearest verb."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None:
            if args[0] in PROTOCOLS:
                raise UserError(f"{args[0]!r} is a protocol, not a verb: write {ctx.info_name} run {args[0]}")
            raise unknown("verb", args[0], self.commands)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  sweep.py                                  run $NOISEGRID_PROTOCOL, or else quickstart
  sweep.py plan quickstart                  what would run
  sweep.py run quickstart --store results/  run what is missing; also resumes
  sweep.py VERB --help                      options and examples of a verb""",
)
@click.pass_context
def app(ctx: click.Context) -> int | None:
    """Measure how much of a trained model's run-to-run variation each source of nondeterminism causes.

    PROTOCOL is a short name, my_pkg.study:make or ./study.py:make; without it, $NOISEGRID_PROTOCOL or else quickstart.
    """
    if ctx.invoked_subcommand is None:
        return int(run.main(args=[], prog_name=f"{ctx.info_name} run", standalone_mode=False))
    return None


for _verb in (plan, run, status, logs, report, check, replay, compact, verify, export, import_, doctor, list_, show):
    app.add_command(_verb)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows the program's name; None: those of this process.

    Returns:
        The exit code: 0, 1 (not everything is as it should be), 2 (a mistake, named in one line), 3 (the time budget
        of ``run`` is used up) or 130 (Ctrl-C).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Protocols, architectures and trainers of the user's own are imported from where he works.
            if (here := _working_directory()) not in sys.path:
                sys.path.append(here)
            code = app.main(args=None if arguments is None else list(arguments), standalone_mode=False)
            return code if isinstance(code, int) else 0
        except UserError as error:
            return _mistake(str(error))
        except click.ClickException as error:
            return _mistake(error.format_message())
        except click.Abort:
            return INTERRUPTED
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return _mistake(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory has been deleted; change to one that exists") from None


def _mistake(message: str) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return MISTAKE
