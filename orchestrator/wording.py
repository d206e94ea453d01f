"""Numbers, sizes and times as a person reads them."""

from __future__ import annotations


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 run``, ``2 runs``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def amount(number: float) -> str:
    """A large number to three digits: ``12,345``, ``1.23 million``, ``18 billion``."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"


def size(count: float) -> str:
    """A number of bytes to three digits: ``1.23 GB``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} kB"


def duration(seconds: float) -> str:
    """A time span in its two largest units: ``48 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def device_time(seconds: float, unit: str) -> str:
    """Time of devices added up: ``12.3 GPU hours``, ``25 core minutes``."""
    if seconds < 90:
        return f"{seconds:.0f} {unit} seconds"
    if seconds < 3600:
        return f"{seconds / 60:.0f} {unit} minutes"
    hours = seconds / 3600
    return f"{hours:,.0f} {unit} hours" if hours >= 100 else f"{hours:.3g} {unit} hours"
