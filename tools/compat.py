"""Run the core of the tests on versions of torch, each in an environment of its own.

    make compat VERSIONS="2.11.0 2.15.0"

The script prints a table with one row for each version. The environments stay in ``.compat/``. If
the Python that runs the script has that version (``make compat PYTHON=...``), the environment uses
it and installs none.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from environment import ROOT, make, own_torch, pip, python_of, tested

#: The core: tests of code that uses private names of torch, and training in real processes.
CORE = (
    "tests/passes/capture/test_captured_step.py",
    "tests/passes/shard/test_lower_markers.py",
    "tests/passes/graph/test_printer.py",
    "tests/end_to_end/test_checkpoints.py",
    "tests/end_to_end/test_errors.py",
    "tests/osdp_compile/runtime/test_p2p.py",
    "tests/osdp_compile/lowering/test_inductor_fusion.py",
    "tests/end_to_end/test_native_collectives.py",
    "tests/end_to_end/test_parameter_kinds.py",
    "tests/end_to_end/test_snapshots.py",
    "tests/project/test_torch_versions.py",
    "tests/end_to_end/test_training.py",
)


def counts(output: str) -> dict[str, int]:
    """Numbers of tests by result, from pytest's last line; empty without such a line."""
    lines = [line for line in output.splitlines() if re.search(r" in [0-9.]+s", line)]
    if not lines:
        return {}
    found = re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1])
    return {name: int(number) for number, name in found}


def row(version: str, found: dict[str, int], minutes: float) -> str:
    """One line of the table."""
    if not found:
        return f"| {version} | pytest did not get to its end | | | |"
    failed = found.get("failed", 0) + found.get("error", 0)
    passed, skipped = found.get("passed", 0), found.get("skipped", 0)
    return f"| {version} | {passed} | {failed} | {skipped} | {minutes:.0f} min |"


def run(version: str, folder: Path, tests: tuple[str, ...]) -> tuple[str, bool]:
    """Test one version; the table row, and whether all tests passed."""
    plain = (own_torch() or "").split("+")[0]
    print(make(folder, None if plain == version else f"torch=={version}"), flush=True)
    pip(folder, "--editable", ".[dev]")
    started = time.monotonic()
    done = subprocess.run(
        [python_of(folder), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OSDP_TEST_INDUCTOR": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout[-4000:], flush=True)
    minutes = (time.monotonic() - started) / 60
    return row(version, counts(done.stdout), minutes), done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=tested())
    parser.add_argument("--folder", type=Path, default=ROOT / ".compat")
    parser.add_argument("--tests", nargs="*", default=CORE, help="other tests than the core")
    given = parser.parse_args()
    ended = [run(version, given.folder / version, tuple(given.tests)) for version in given.versions]
    print("| torch | passed | failed | skipped | took |\n|---|---|---|---|---|")
    print("\n".join(line for line, _ in ended))
    return 0 if all(passed for _, passed in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
