"""Another process whose sets and dictionaries of strings have another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed_with_another_hash_seed(code: str) -> str:
    """The last line that Python code prints in a process with another hash seed than this one's."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1]
