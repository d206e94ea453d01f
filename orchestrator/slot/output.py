"""What a process prints: its beginning and its end are kept, in memory, however much it is."""

from __future__ import annotations

import os
import select
import threading
import time

HEAD = 2**18
TAIL = 3 * 2**18
"""Bytes that are kept of the beginning and of the end: 1 MiB in all."""

_LAST_READS = 32
"""How often something is read at most once it is to stop; a pipe holds 16 times as much as is read at a time."""

_SETTLE_SECONDS = 2.0
"""How long to wait for what has been printed to have been read."""


class Output:
    """The reading end of a pipe that a process prints to.

    ``writing`` is the other end, for that process; close it here once it has been started. A thread reads whatever
    comes, so that a process that prints a gigabyte fills neither the disk nor the memory, and never waits for long.
    """

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        self._waking, self._wake = os.pipe()
        self._lock = threading.Lock()
        self.begin()
        self._thread = threading.Thread(target=self._read, name="output", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Forget what has been printed."""
        with self._lock:
            self._head, self._tail, self._size = bytearray(), bytearray(), 0

    @property
    def size(self) -> int:
        """How many bytes have been printed since the beginning."""
        return self._size

    def text(self) -> str:
        """What has been printed, with a line in place of what has been left out."""
        with self._lock:
            head, tail, size = bytes(self._head), bytes(self._tail[-TAIL:]), self._size
        left_out = size - len(head) - len(tail)
        cut = f"\n[... {left_out:,} bytes are left out here ...]\n" if left_out else ""
        return head.decode(errors="replace") + cut + tail.decode(errors="replace")

    def tail(self, size: int) -> str:
        """The last ``size`` bytes of what has been printed."""
        with self._lock:
            return bytes(self._head + self._tail if len(self._tail) < size else self._tail)[-size:].decode(
                errors="replace"
            )

    def settle(self) -> None:
        """Wait until what has been printed has been read."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            if not select.select([self._reading], [], [], 0)[0]:
                with self._lock:  # What was taken from the pipe has been kept by the time this is free.
                    return
            time.sleep(0.002)

    def close(self) -> None:
        """Stop reading. What has been read stays; whoever goes on printing is told that nobody listens."""
        os.close(self._wake)
        self._thread.join()
        # Not before, and by nobody else: settle() looks at the pipe while the thread may be ending by itself.
        os.close(self._reading)
        os.close(self._waking)

    def _read(self) -> None:
        waiting = select.poll()
        waiting.register(self._reading, select.POLLIN)
        waiting.register(self._waking, select.POLLIN)
        left = _LAST_READS
        while left:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            # When it is to stop, what is in the pipe comes first, but not what is printed for ever.
            left -= self._waking in ready
            with self._lock:
                data = os.read(self._reading, 2**16) if self._reading in ready else b""
                self._keep(data)
            if not data:
                return

    def _keep(self, data: bytes) -> None:
        self._size += len(data)
        room = HEAD - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * TAIL:
            del self._tail[:-TAIL]
