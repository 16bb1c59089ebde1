"""Parse and format bytes and seconds for people."""

from __future__ import annotations

import fractions
import math
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
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
#: A limit with more significant digits in a unit was not given in that unit.
_ROUND_DIGITS = 5
#: A smaller limit without a unit is an error. No step fits into so few bytes.
_LEAST_BARE_TEXT, _LEAST_BARE_NUMBER = 1 << 20, 1 << 16
#: From this number on, the error suggests MiB instead of GiB.
_LEAST_OF_MEBIBYTES = 256
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


def parse_limit(value: int | str) -> int:
    """A memory limit in bytes, as :func:`parse_bytes`; a forgotten unit is an error.

    Raises:
        ValueError: for a malformed size, and for a number without a unit that is implausibly
            small. A unit makes every size plausible: ``"8B"``.

    >>> parse_limit("8GiB")
    8589934592
    >>> parse_limit("8")
    Traceback (most recent call last):
    ...
    ValueError: '8' is 8 bytes: did you mean '8GiB'? A number without a unit counts bytes
    """
    size = parse_bytes(value)
    is_text = isinstance(value, str)
    bare = not is_text or not str(value).strip()[-1].isalpha()
    if bare and size < (_LEAST_BARE_TEXT if is_text else _LEAST_BARE_NUMBER):
        meant = f"{str(value).strip()}{'GiB' if size < _LEAST_OF_MEBIBYTES else 'MiB'}"
        raise ValueError(
            f"{value!r} is {size} byte{'s' if size > 1 else ''}: did you mean {meant!r}? "
            "A number without a unit counts bytes"
        )
    return size


def parse_seconds(value: float | str) -> float:
    """Seconds from a number of seconds, or a text with a unit (us, ms, s, min): ``"300ms"``.

    Raises:
        ValueError: for anything else, naming the units that are allowed. A text without a unit is
            an error.

    >>> parse_seconds("300ms")
    0.3
    >>> parse_seconds("1.5 min"), parse_seconds(2)
    (90.0, 2.0)
    """
    allowed = "a number of seconds, or text with a unit, such as '300ms' or '2.5s' (us, ms, s, min)"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a duration: give {allowed}")
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        if match is None or match[2].lower() not in _SECONDS:
            raise ValueError(f"{value!r} is not a duration: give {allowed}")
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
    else:
        seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"{value!r} is not a duration: it must be finite and above zero; give {allowed}"
        )
    return seconds


def format_bytes(size_bytes: float, decimal: bool = False, round_up: bool = False) -> str:
    """Bytes for people, in powers of 1024, or of 1000 if ``decimal``.

    ``round_up``: never print less than the size. So a printed least limit is sufficient.

    >>> format_bytes(1342177280)
    '1.25 GiB'
    >>> format_bytes(-2048)
    '-2.00 KiB'
    >>> format_bytes(1342177280, decimal=True)
    '1.34 GB'
    >>> format_bytes(1342177281, round_up=True)
    '1.26 GiB'
    """
    size = float(size_bytes)
    step, units = (1000, ("kB", "MB", "GB", "TB")) if decimal else (1024, _BINARY)
    if abs(size) < step:
        return f"{size:.0f} B"
    for unit in units:
        size /= step
        if abs(size) < step or unit == units[-1]:
            break
    return f"{math.ceil(size * 100) / 100 if round_up else size:.2f} {unit}"


def is_decimal(limit_bytes: int) -> bool:
    """Whether a limit was probably given in powers of 1000: it has fewer digits there.

    >>> is_decimal(4_000_000_000), is_decimal(8 << 30), is_decimal(123_456_789)
    (True, False, False)
    """
    decimal, binary = _digits(limit_bytes, 1000), _digits(limit_bytes, 1024)
    return len(decimal) <= _ROUND_DIGITS and len(decimal) < len(binary)


def format_limit(limit_bytes: int) -> str:
    """A limit in the unit in which the user probably gave it.

    >>> format_limit(4_000_000_000), format_limit(8 << 30), format_limit(3 << 29)
    ('4 GB', '8 GiB', '1.5 GiB')
    >>> format_limit(123_456_789)
    '117.74 MiB'
    """
    decimal = is_decimal(limit_bytes)
    text = format_bytes(limit_bytes, decimal)
    if len(_digits(limit_bytes, 1000 if decimal else 1024)) > _ROUND_DIGITS:
        return text
    number, unit = text.split()
    if "." in number:
        exact = limit_bytes / _UNITS[unit.upper()]
        number = f"{exact:.6f}".rstrip("0").rstrip(".")
    return f"{number} {unit}"


def _digits(size_bytes: int, step: int) -> str:
    """Significant digits of a size in the largest unit that does not exceed it."""
    size = fractions.Fraction(size_bytes)
    while size >= step:
        size /= step
    text = f"{float(size):.12f}".replace(".", "")
    return text.strip("0")


def format_ranks(ranks: int) -> str:
    """A number of ranks in words: ``one rank``, ``8 ranks``."""
    return "one rank" if ranks == 1 else f"{ranks} ranks"


def each_of(ranks: int) -> str:
    """Each of a number of ranks in words: ``one rank``, ``each of 8 ranks``."""
    return format_ranks(ranks) if ranks == 1 else f"each of {format_ranks(ranks)}"


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
