"""What a person sees while a first call or a recompilation takes its time."""

from __future__ import annotations

import io
import logging
import sys

import torch
from torch import nn

from osdp_compile import progress
from passes.types.hardware import generic


class Records(logging.Handler):
    """The messages of a logger, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def first_call_and_another_batch(rank, world_size):
    log = logging.getLogger("osdp_compile")
    records, before = Records(), log.level
    log.addHandler(records)
    log.setLevel(logging.INFO)
    try:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        options = {"hardware": generic()}
        compiled = torch.compile(model, backend="osdp", options=options, dynamic=False)
        for rows in (4, 4, 6):
            compiled(torch.randn(rows, 8)).sum().backward()
    finally:
        log.removeHandler(records)
        log.setLevel(before)
    return records.texts


def test_a_line_for_each_stage_and_the_cause_of_a_recompilation_on_rank_zero(two_ranks):
    said, of_the_other = two_ranks.run(first_call_and_another_batch)
    stages = [text.removeprefix("first call: ") for text in said if text.startswith("first call:")]
    names = [text.split(" (after ")[0] for text in stages]
    assert names == ["measuring the machine", "tracing", "planning", "sharding", "compiling"]
    (summary,) = (text for text in said if text.startswith("first call took"))
    assert "before compiling: " in summary and "planning " in summary
    compiled = [text for text in said if text.startswith("compiled ")]
    assert len(compiled) == 2, said
    first, again = compiled
    assert first.startswith("compiled in ") and first.endswith("s")
    assert again.startswith("compiled again in ")
    assert "size mismatch at index 0. expected 4, actual 6" in again
    assert not [text for text in of_the_other if "first call" in text or "compiled" in text]


def test_stages_and_their_seconds_in_a_log():
    lines: list[str] = []
    with progress.stages("work", lines.append, lines_too=True) as seconds:
        progress.stage("one")
        progress.detail("not for a log")
        progress.stage("two")
    assert lines[0] == "work: one"
    assert lines[1].startswith("work: two") and len(lines) == 2
    assert list(seconds) == ["one", "two"] and all(taken >= 0 for taken in seconds.values())
    progress.stage("of nothing")
    assert len(lines) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_moves_and_goes(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    lines: list[str] = []
    with progress.stages("work", lines.append):
        progress.stage("planning")
        progress.detail("plan 3 of up to 9")
    assert lines == [], "a terminal gets the line that moves in place of lines"
    assert "work: planning, plan 3 of up to 9" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K"), "the line is still there at the end"


def test_a_stage_ends_where_an_error_does():
    try:
        with progress.stages("work", lambda text: None, lines_too=True):
            progress.stage("one")
            raise ValueError
    except ValueError:
        pass
    assert progress._under_way == []
