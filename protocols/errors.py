"""The one way a user's mistake is reported: a single sentence, raised before anything is trained."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake of the user's. The command line prints it as one line and exits with code 2.

    The message says what is wrong, where, and what would be right.
    """


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest valid one.

    Args:
        kind: what was being named, in words ("source", "field of recipe").
        name: what the user wrote.
        known: every valid name.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return UserError(f"unknown {kind} {name!r}{hint} valid: {', '.join(names)}")
