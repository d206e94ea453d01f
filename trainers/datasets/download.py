"""Fetch one file over HTTP: retried, resumed where the server can, and put in place only when it is the right one."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from protocols.errors import UserError
from trainers.datasets.bar import bar

ATTEMPTS = 3
PAUSE = 2.0
"""Seconds before the second attempt; doubled for each one after."""
TIMEOUT = 30.0
"""Seconds without a byte after which an attempt has failed."""


def download(url: str, target: Path, verify: Callable[[Path], object], advice: str) -> None:
    """Fetch ``url`` into ``target``.

    What has arrived lies in ``target`` + ``.part``, from where a later call goes on.

    Args:
        url: what to fetch.
        target: where to put it; its folder is created.
        verify: raises UserError if the file at a path is not the right one.
        advice: what the user can do instead, for the error.

    Raises:
        UserError: the file could not be fetched or is not the right one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        resumed = part.exists()
        try:
            _transfer(url, part)
            verify(part)
        except UserError as error:
            part.unlink()
            problem = str(error)
            if not resumed:  # else the older piece may be to blame: once more, from the start
                break
        except urllib.error.HTTPError as error:
            error.close()
            problem = f"the server answers {error.code} {error.reason}"
            if error.code == 416:  # nothing follows the piece we have
                part.unlink()
            elif error.code < 500:
                break
        except (OSError, HTTPException) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
        else:
            part.replace(target)
            return
    raise UserError(f"cannot download {target.name} from {url}: {problem}; {advice}")


def _transfer(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "noisegrid", **({"Range": f"bytes={have}-"} if have else {})}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        if response.status != 206:  # the whole file, whatever was asked for
            have = 0
        length = response.headers["Content-Length"]
        total = None if length is None else have + int(length)
        with (
            bar(url.rsplit("/", 1)[-1], total, have, size=True) as advance,
            part.open("ab" if have else "wb") as file,
        ):
            while chunk := response.read(1 << 16):
                file.write(chunk)
                advance(len(chunk))
    if total is not None and part.stat().st_size < total:
        raise ConnectionError(f"the connection ended after {part.stat().st_size} of {total} bytes")
