"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import re

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or a text such as ``"8GiB"``, ``"500MB"``, ``"1.5 GiB"``.

    Raises:
        ValueError: for anything else, naming the units that are allowed.

    >>> parse_bytes("180MiB")
    188743680
    >>> parse_bytes("500MB")
    500000000
    """
    allowed = (
        "a whole number of bytes, or text such as '8GiB', '500MB' "
        "(B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)"
    )
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size: give {allowed}")
    if isinstance(value, int):
        if value <= 0:
            raise ValueError(f"{value!r} is not a size: it must be above zero; give {allowed}")
        return value
    match = _TEXT.fullmatch(value)
    if match is None or (match[2].upper() or "B") not in _UNITS:
        raise ValueError(f"{value!r} is not a size: give {allowed}")
    size = round(float(match[1]) * _UNITS[match[2].upper() or "B"])
    if size <= 0:
        raise ValueError(f"{value!r} is not a size: it must be above zero; give {allowed}")
    return size


def format_bytes(size_bytes: float) -> str:
    """Bytes for people, in powers of 1024.

    >>> format_bytes(1342177280)
    '1.25 GiB'
    >>> format_bytes(-2048)
    '-2.00 KiB'
    """
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Seconds for people.

    >>> format_seconds(0.0034)
    '3.4 ms'
    >>> format_seconds(2.5)
    '2.50 s'
    """
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
