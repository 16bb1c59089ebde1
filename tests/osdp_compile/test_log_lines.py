"""Who sees which lines of the log: by TORCH_LOGS, by rank, and without any configuration."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from osdp_compile.log_lines import OF_ALL_RANKS
from osdp_compile.trace import fake_world
from tests.chosen import core, thorough

ROOT = Path(__file__).parents[2]

START = """
import logging
import torch

{configure}
from osdp_compile.log_lines import NAMES, ensure_visible, leave_to_torch
log = logging.getLogger("osdp_compile")
levels = torch._logging._internal.log_state.log_qname_to_level
leave_to_torch([name for name in NAMES if name in levels])
"""
LINES = """
ensure_visible(log)
log.warning("a warning")
log.info("an event")
log.debug("a detail")
logging.getLogger("passes").debug("a detail of a pass")
"""
WARNING, EVENT = ["a warning"], ["a warning", "an event"]
ALL = [*EVENT, "a detail", "a detail of a pass"]
BASIC = "logging.basicConfig(level=logging.INFO)"
#: TORCH_LOGS, the program's own configuration, and the lines that are seen, each once.
CASES = {
    "nothing": (None, "", EVENT),
    "another component": ("graph_breaks", "", EVENT),
    "osdp": ("osdp", "", EVENT),
    "more": ("+osdp", "", ALL),
    "more, beside logging of the program": ("+osdp", BASIC, ALL),
    "less, in a list": ("graph_breaks,-osdp", "", []),
    "the package": ("osdp_compile", "", EVENT),
    "more of the package, in a list": ("dynamo, +osdp_compile", BASIC, ALL),
}


def run(code: str, torch_logs: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TORCH_LOGS", None)
    if torch_logs is not None:
        environment["TORCH_LOGS"] = torch_logs
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=500
    )


def seen(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.fixture(scope="module")
def processes(request):
    """Processes that log the same lines, two at a time: each imports torch, for seconds."""
    here = (one for one in request.session.items if one.path == request.path)
    chosen = [one.callspec.params["case"] for one in here if "processes" in one.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(run, START.format(configure=CASES[name][1]) + LINES, CASES[name][0])
            for name in chosen
        }


@pytest.mark.parametrize("case", core(CASES, "nothing", "osdp", "more"))
def test_torch_logs_chooses_the_lines_and_each_is_seen_once(processes, case):
    lines = seen(processes[case].result())
    found = re.findall(r"^(\S+).*?(a warning|an event|a detail of a pass|a detail)$", lines, re.M)
    torch_logs, _, expected = CASES[case]
    assert [text for _, text in found] == expected, lines
    assert len(lines.splitlines()) == len(expected)
    by_torch = torch_logs is not None and "osdp" in torch_logs
    starts = [start[0] if by_torch else start for start, _ in found]
    assert starts == (["W", "I", "V", "V"] if by_torch else ["[osdp]"] * 2)[: len(expected)]


AFTER_THE_FIRST_LINE = """
torch._logging.set_logs(modules={{"{name}": logging.DEBUG}})
leave_to_torch(["{name}"])
"""


@pytest.mark.parametrize("name", ["osdp", *thorough("osdp_compile")])
def test_set_logs_takes_over_lines_that_were_shown_before(name):
    after = AFTER_THE_FIRST_LINE.format(name=name)
    lines = seen(run(START.format(configure="") + LINES + after + LINES, None)).splitlines()
    assert lines[: len(EVENT)] == [f"[osdp] {text}" for text in EVENT]
    assert [line.split("] ")[1] for line in lines[len(EVENT) :]] == ALL


def test_a_name_that_is_none_is_refused_by_torch():
    """What torch says of any name that it cannot find: the package osdp is there for that."""
    done = run("import torch", "osdp_backend")
    assert done.returncode == 1 and "Invalid log settings: osdp_backend" in done.stderr
    assert (ROOT / "osdp_compile/log_name/osdp/__init__.py").exists()
    assert '"osdp_compile/log_name"]' in (ROOT / "pyproject.toml").read_text()


def test_other_ranks_show_warnings_of_their_own_only():
    log = logging.getLogger("osdp_compile")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        for rank in range(2):
            with fake_world(2, rank):
                log.debug("rank %d: a detail", rank)
                log.info("rank %d: an event", rank)
                log.warning("rank %d: a warning", rank)
                log.warning("rank %d: a warning of all", rank, extra=OF_ALL_RANKS)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    of_zero = ["a detail", "an event", "a warning", "a warning of all"]
    assert records == [*(f"rank 0: {one}" for one in of_zero), "rank 1: a warning"]
