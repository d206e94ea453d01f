"""A file that is read over a network in parts."""

from __future__ import annotations

import io
import os
from collections.abc import Callable


class Ranges(io.RawIOBase):
    """Bytes that are fetched when they are asked for, with a little of what follows.

    Args:
        fetch: gives the bytes from the first position up to the second.
        size: of all.
        tail: the last bytes, which are known already: a Parquet file is read from its end.
    """

    AHEAD = 2**16
    """Bytes that are fetched at least. The short columns of a record lie in two or three such stretches."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, tail: bytes) -> None:
        self._fetch = fetch
        self._size = size
        self._position = 0
        self._tail = (size - len(tail), tail)
        self._window = (0, b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to another position."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes, fewer only where the file ends."""
        start = self._position
        end = self._size if size is None or size < 0 else min(start + size, self._size)
        if end <= start:
            return b""
        self._position = end
        for first, data in (self._tail, self._window):
            if first <= start and end <= first + len(data):
                return data[start - first : end - first]
        self._window = (start, self._fetch(start, min(max(end, start + self.AHEAD), self._size)))
        return self._window[1][: end - start]
