"""The command that a protocol wants between its runs, to have the machine start each from the same state."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from typing import Any

from orchestrator.slot import processes

SECONDS = 120.0
"""How long the command may take before it is ended."""


def between_runs(command: str) -> dict[str, Any]:
    """Run the command in a shell; what became of it, for a record's provenance.

    Returns:
        ``command``, its ``exit_code`` (None: it took too long and was ended), and ``seconds``.
    """
    began, mark = time.monotonic(), uuid.uuid4().hex
    code: int | None = None
    with subprocess.Popen(
        command,
        shell=True,
        env={**os.environ, processes.MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            processes.end(process.pid, mark)
    return {"command": command, "exit_code": code, "seconds": round(time.monotonic() - began, 3)}
