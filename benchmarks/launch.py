"""Start one measurement on all ranks and bring back what rank 0 wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import Processes
from benchmarks.train import Work

ROOT = Path(__file__).resolve().parent.parent


def measure_on(
    hosts: Processes,
    work: Work,
    way: str,
    phase: str,
    options: dict[str, Any] | None = None,
    cache: Path | None = None,
    profiles: Path | None = None,
    timeout_seconds: float = 900.0,
) -> dict[str, Any]:
    """Run ``benchmarks.train`` in fresh processes, one for each rank.

    ``options``: of the osdp backend. ``cache``: of compiled code (None: a new one, cold).
    ``profiles``: as in :func:`environment`.

    Raises:
        RanksError: if a rank fails, or the time is over.
    """
    with tempfile.TemporaryDirectory(prefix="osdp-bench") as folder:
        out = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "benchmarks.train"),
            *("--backend", hosts.backend),
            *("--way", way, "--phase", phase, "--out", str(out)),
            *("--work", json.dumps(dataclasses.asdict(work))),
            *("--options", json.dumps(options or {})),
            *("--started", str(time.time())),
        ]
        variables = environment(cache or Path(folder) / "cache", profiles)
        hosts.run(command, variables, timeout_seconds)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def kept_code(folder: Path) -> Path:
    """Inductor's cache of the environment; without one, a folder in ``folder``."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(given) if given else folder / "code"


def environment(cache: Path, profiles: Path | None = None) -> dict[str, str]:
    """Variables of a rank. ``cache``: of compiled code.

    ``profiles``: where what was measured of machine and network is kept, as it is for a user
    (None: measured anew each time: the network may have another rate).
    """
    inherited = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([inherited] if inherited else [])]),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OSDP_CACHE_DIR": str(profiles or ""),
    }
