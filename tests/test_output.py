"""What a process printed: its beginning and its end, and the end of the pipe at any moment."""

from __future__ import annotations

import os
import select
from typing import Any

import pytest

from orchestrator.slot.output import HEAD, TAIL, Output


def test_the_beginning_and_the_end_are_kept() -> None:
    output = Output()
    written = 0
    for number in range(200):
        written += os.write(output.writing, f"{number:03}".encode() * 4000)
    output.settle()
    text = output.text()
    assert output.size == written
    assert text.startswith("000000") and text.endswith("199199") and output.tail(6) == "199199"
    assert f"\n[... {written - HEAD - TAIL:,} bytes are left out here ...]\n" in text
    output.begin()
    assert output.text() == "" and output.size == 0
    os.close(output.writing)
    output.close()


def test_the_last_writer_may_go_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it the reading thread goes by itself."""
    output = Output()
    os.write(output.writing, b"last words")
    look = select.select

    def late(*arguments: Any) -> Any:
        os.close(output.writing)
        output._thread.join()
        return look(*arguments)

    monkeypatch.setattr(select, "select", late)
    output.settle()
    assert output.text() == "last words"
    output.close()


def test_closing_leaves_nothing_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for writer_goes_first in (True, False):
        output = Output()
        if writer_goes_first:
            os.close(output.writing)
            output._thread.join()
        output.close()
        if not writer_goes_first:
            with pytest.raises(BrokenPipeError):
                os.write(output.writing, b"to nobody")
            os.close(output.writing)
    assert set(os.listdir("/proc/self/fd")) == before
