"""Tested versions of torch, and a warning about newer ones.

Plain Python that imports nothing: ``tools/environment.py`` reads :data:`TESTED` without torch.
"""

#: Oldest first. ``make compat`` tests each and prints a row of a table.
TESTED = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: ``2.15.0+cpu`` and ``2.15.0a0`` give (2, 15)."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def newer_than_tested(version: str) -> str | None:
    """The warning for a version newer than all tested ones; None: no warning."""
    newest = TESTED[-1]
    if release(version) <= release(newest):
        return None
    return (
        f"torch {version} is newer than {newest}, the newest that osdp_compile was tested with: it "
        "is used as it is. If something fails, try a tested one: " + ", ".join(TESTED)
    )


def lacks(version: str, error: ImportError | AttributeError) -> str:
    """The error text for a missing private name of torch."""
    missing = str(error)
    if isinstance(error, ImportError) and error.name and "cannot import name" in missing:
        missing = f"{error.name}.{missing.split(chr(39))[1]}"
    return (
        f"osdp_compile needs {missing}, which torch {version} does not have. Tested versions: "
        + ", ".join(TESTED)
    )
