"""The sweep over families of models: its runs, its verdicts, its table."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.families import records, table
from benchmarks.families.catalogue import FAMILIES, find_family
from benchmarks.families.rank import run
from benchmarks.families.records import Record
from benchmarks.families.runner import Sweep, _outcome_of
from benchmarks.families.verdict import TOLERANCE, differs_from_ddp, judge
from tests.ranks import Ranks

FAMILY = find_family("frozen layer")


def record(way: str, outcome="ran", error="", family=FAMILY, **figures) -> Record:
    rank = {
        "losses": [2.0, 1.5],
        "norms": [1.0, 1.0],
        "peak_bytes": 90,
        "limit_bytes": 100,
        "parameters": 7,
        "decisions": {"shard_keep": 2},
        **figures,
    }
    ranks = [rank, rank] if outcome == "ran" else []
    return Record(family.name, family.package, way, outcome, 1.0, ranks, error)


HANG = """run on 2 ranks
no answer after 1 s
--- rank 0 hangs:
Current thread 0x1 (most recent call first):
  File "/x/a.py", line 3 in wait
  File "/x/b.py", line 5 in g
"""

PLACE = " at a.py:3 wait < b.py:5 g"


def runs(**changed: Record) -> dict[str, Record]:
    return {way: changed.get(way, record(way)) for way in ("ddp", "osdp", "limit")}


@pytest.mark.thorough
def test_a_family_trains_in_every_way_and_works(inductor_cache):
    with Ranks(2, inductor_cache) as ranks:  # without the models of other tests, as in the sweep
        found = {
            way: Record(FAMILY.name, "by hand", way, "ran", 1.0, ranks.run(run, FAMILY.name, way))
            for way in ("ddp", "osdp", "limit")
        }
    verdict = judge(FAMILY, found)
    assert verdict.kind == "works", verdict.reason
    assert 0 < verdict.difference < TOLERANCE
    assert 0.5 < verdict.peak_of_limit <= 1
    assert any(kind.startswith("shard") for kind in verdict.decisions)
    assert len(set(found["ddp"].ranks[0]["losses"])) > 1, "the reference does not learn"


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"osdp": record("osdp", losses=[2.0, 1.6])}, "osdp: 6.7e-02 from DDP"),
        ({"limit": record("limit", norms=[1.0, 1.01])}, "limit: 1.0e-02 from DDP"),
        ({"limit": record("limit", losses=[2.0, float("nan")])}, "limit: inf from DDP"),
        ({"limit": record("limit", peak_bytes=101)}, "peak 1.01 x the limit"),
        ({"osdp": record("osdp", decisions={})}, "osdp: nothing is planned"),
        ({"osdp": record("osdp", "failed", "E\nKeyError: 'x'\n")}, "osdp: KeyError: 'x'"),
        (
            {"limit": record("limit", "hung", HANG)},
            "limit: hang after 1 s" + PLACE,
        ),
        ({"ddp": record("ddp", "failed", "KeyError: 1")}, "the reference (DDP): KeyError: 1"),
    ],
    ids=["loss", "norm", "nan", "peak", "unplanned", "error", "hang", "reference"],
)
def test_what_differs_or_stops_fails_with_the_reason(changed, reason):
    assert judge(FAMILY, runs()).kind == "works"
    verdict = judge(FAMILY, runs(**changed))
    assert (verdict.kind, verdict.reason) == ("fails", reason)


def test_above_the_limit_with_a_warning_is_told_from_above_it_in_silence():
    said = "this step needs 2 MiB, above memory_limit=1 MiB: beside the 1 MiB that the plan counts"
    verdict = judge(FAMILY, runs(limit=record("limit", peak_bytes=150, log=[said])))
    assert (verdict.kind, verdict.reason) == ("warns", said)
    without_cause = "this backward needs 2 MiB, above memory_limit=1 MiB: its plan predicts 1 MiB"
    verdict = judge(FAMILY, runs(limit=record("limit", peak_bytes=150, log=[without_cause])))
    assert verdict.kind == "fails"
    wrong = record("limit", peak_bytes=150, log=[said], norms=[1.0, 1.01])
    assert judge(FAMILY, runs(limit=wrong)).kind == "fails"


def test_a_family_that_multiplies_rounding_is_held_to_how_far_ddp_is_from_itself():
    differs = {"osdp": record("osdp", norms=[1.0, 1.02])}
    assert differs_from_ddp(FAMILY, runs(**differs)) and not differs_from_ddp(FAMILY, runs())
    close = {**runs(**differs), "rounding": record("rounding", norms=[1.0, 1.01])}
    verdict = judge(FAMILY, close)
    assert verdict.kind == "works" and "1e-07 is 1e-02 from DDP" in verdict.reason
    far = {**runs(**differs), "rounding": record("rounding", norms=[1.0, 1.001])}
    assert judge(FAMILY, far).kind == "fails"
    kernels = {**far, "compiled": record("compiled", norms=[1.0, 1.01])}
    verdict = judge(FAMILY, kernels)
    assert verdict.kind == "works" and "Inductor's kernels is 1e-02 from DDP" in verdict.reason


def test_a_run_with_another_first_step_says_nothing_of_rounding():
    differs = {"osdp": record("osdp", norms=[1.0, 1.02])}
    for norms in ([0.0, 0.0], [1.0, float("inf")]):
        no_rounding = {**runs(**differs), "compiled": record("compiled", norms=norms)}
        verdict = judge(FAMILY, no_rounding)
        assert (verdict.kind, verdict.reason) == ("fails", "osdp: 2.0e-02 from DDP"), norms


def test_only_an_expected_message_of_this_package_counts_as_refused():
    family = dataclasses.replace(FAMILY, refused="double backward")
    said = "osdp_compile.errors.OsdpError: no double backward: do this"
    refusal = record("osdp", "refused", said)
    assert judge(family, runs(osdp=refusal)).kind == "refused"
    assert judge(FAMILY, runs(osdp=refusal)).kind == "fails"
    crash = record("osdp", "failed", "RuntimeError: no double backward")
    assert judge(family, runs(osdp=crash)).kind == "fails"


def test_a_rank_failure_is_told_from_a_hang_and_a_refusal():
    assert _outcome_of("run on 2 ranks\nno answer after 5 s\n--- rank 0 hangs:\n") == "hung"
    assert _outcome_of("run\n--- rank 0: Traceback\nosdp_compile.errors.OsdpError: x") == "refused"
    assert _outcome_of("run\n--- rank 0: Traceback\nKeyError: 'x'") == "failed"


def test_a_sweep_goes_on_where_it_ended_and_asks_inductor_where_osdp_fails(tmp_path, monkeypatch):
    started = []

    def one(self, family, way):
        started.append(way)
        return record(way, "failed" if way == "limit" else "ran", family=family)

    monkeypatch.setattr(Sweep, "_run", one)
    sweep = Sweep(tmp_path / "results.jsonl", tmp_path, 1.0)
    record("ddp").append_to(sweep.results)
    assert [r.way for r in sweep.run([FAMILY])] == started == ["osdp", "limit", "inductor"]
    assert list(sweep.run([FAMILY])) == []
    assert set(records.read(sweep.results)) == {
        (FAMILY.name, way) for way in ("ddp", "osdp", "limit", "inductor")
    }


def test_the_table_names_versions_counts_and_reasons(tmp_path):
    kept = runs(limit=record("limit", peak_bytes=150))
    kept = {
        (FAMILY.name, way): dataclasses.replace(one, versions={"torch": "2.13.0"}, revision="abc")
        for way, one in kept.items()
    }
    table.write(tmp_path / "families.md", kept)
    text = (tmp_path / "families.md").read_text()
    assert "1 families: 0 works, 0 warns, 0 refused, 1 fails" in text
    assert "torch 2.13.0." in text
    assert "| frozen layer | by hand | fails |" in text
    assert "peak 1.50 x the limit | abc |" in text


def named(family, ways):
    return {(family, way): dataclasses.replace(r, family=family) for way, r in ways.items()}


def test_a_row_stays_until_its_family_has_run_again(tmp_path):
    document = tmp_path / "families.md"
    other = next(family.name for family in FAMILIES if family.name != FAMILY.name)
    failing = runs(limit=record("limit", peak_bytes=150))
    table.write(document, named(other, failing))
    table.write(document, named(FAMILY.name, failing))
    text = document.read_text()
    assert "2 families: 0 works, 0 warns, 0 refused, 2 fails" in text
    half = named(FAMILY.name, failing)
    del half[FAMILY.name, "ddp"]
    table.write(document, half)
    assert document.read_text() == text
    table.write(document, named(FAMILY.name, runs()))
    assert "2 families: 1 works, 0 warns, 0 refused, 1 fails" in document.read_text()


def test_names_are_unique_and_there_are_at_least_sixty():
    names = [family.name for family in FAMILIES]
    assert len(names) == len(set(names)) >= 60
