"""Amounts with units on the command line: ``3h30m``, ``4GB``."""

from __future__ import annotations

import re

import click

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_BYTES: dict[str, int] = {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", start=1)}
_BYTES |= {f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", start=1)}


class Duration(click.ParamType[float]):
    """Days, hours, minutes and seconds, each at most once and in that order: ``2d``, ``3h30m``, ``1.5h``."""

    name = "duration"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        if isinstance(value, float):
            return value
        number = r"(?:(\d+(?:\.\d+)?)%s)?"
        found = re.fullmatch("".join(number % unit for unit in _SECONDS), value.replace(" ", "").lower())
        if found is None or not any(found.groups()):
            self.fail(f"{value!r} is no duration; write 90s, 45m, 3h30m or 2d.", param, ctx)
        parts = zip(found.groups(default="0"), _SECONDS.values(), strict=True)
        seconds = sum(float(amount) * unit for amount, unit in parts)
        if not seconds:
            self.fail(f"{value!r} is no time at all.", param, ctx)
        return seconds


class Memory(click.ParamType[int]):
    """An amount of memory: ``500MB``, ``4GB``, ``1.5GiB``."""

    name = "memory"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)", value.strip(), re.IGNORECASE)
        if found is None:
            self.fail(f"{value!r} is no amount of memory; write 500MB, 4GB or 1.5GiB.", param, ctx)
        unit = found[2][0].upper() + found[2][1:].replace("b", "B").replace("I", "i")
        return int(float(found[1]) * _BYTES[unit])
