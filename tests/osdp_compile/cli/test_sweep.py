"""``osdp sweep``: its points, what bounds them, and what is refused before anything is planned."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import sys

import pytest
import torch
from torch import nn

from osdp_compile.cli.main import main
from osdp_compile.planning.sweep import Bound, Grid, sweep
from osdp_compile.planning.traced_step import trace
from osdp_compile.reports.sweep_table import limit_text
from passes.types.decision import Decision
from passes.types.hardware import Hardware, LinkRate
from passes.types.hardware_presets import preset

WIDTH, WIDER = 128, 512
MODULE = f"""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear({WIDTH}, {WIDER}, bias=False)
        self.down = nn.Linear({WIDER}, {WIDTH}, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def any_batch(batch):
    return Net(), (torch.empty(batch, {WIDTH}),)

def any_length(batch, sequence_length):
    return Net(), (torch.empty(batch, sequence_length, {WIDTH}),)

def one_batch():
    return Net(), (torch.empty(8, {WIDTH}),)
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDER, bias=False)
        self.down = nn.Linear(WIDER, WIDTH, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


@pytest.fixture(scope="module")
def traced():
    """The training step of a batch size, traced once for each."""
    known = {}

    def of(batch, length):
        if batch not in known:
            with torch.device("meta"):
                known[batch] = trace(Net(), (torch.empty(batch or 8, WIDTH),))
        return known[batch]

    return of


def network(bytes_per_second: float, latency_seconds: float = 1e-6) -> Hardware:
    """10 GFLOP/s, and a network of this rate whose collectives take nothing of the computing."""
    rate = LinkRate(latency_seconds, 1 / bytes_per_second)
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return Hardware("test", {"default": 1e10}, 1e11, 1e-6, dict.fromkeys(kinds, rate))


def test_more_of_anything_is_never_slower_and_fsdp_is_never_faster(traced):
    in_slices = traced  # as fast under the least limit as under none, on a fast network

    def traced(batch, length):
        return dataclasses.replace(in_slices(batch, length), slices=())

    free = traced(8, None).plan({"ranks": 4}, network(1e9)).prediction.peak_bytes
    least = traced(8, None).least_bytes({"ranks": 4}, network(1e9))
    grid = Grid(
        meshes=({"ranks": 4},),
        bandwidths=(0.25, 1.0, 4.0),
        limits=(least // 2, least, (least + free) // 2, None),
        batches=(8,),
    )
    points = sweep(traced, grid, network(1e9))
    assert [(one.bandwidth, one.limit_bytes) for one in points] == [
        (bandwidth, limit) for bandwidth in grid.bandwidths for limit in grid.limits
    ]
    reached = {(one.bandwidth, one.limit_bytes): one for one in points}
    for point in points:
        if point.limit_bytes == least // 2:
            assert point.best is None and point.fsdp is None and point.bound is Bound.MEMORY
            assert point.least_bytes == pytest.approx(least, rel=0.02)
            assert point.fsdp_least_bytes >= point.least_bytes
            continue
        assert point.limit_bytes is None or point.best.said.peak_bytes <= point.limit_bytes
        assert point.without_limit >= 1 and point.without_bandwidth >= 0.999
        assert point.fsdp is None or point.times_fsdp >= 1
    for bandwidth in grid.bandwidths:
        rates = [reached[bandwidth, limit].best.rate for limit in grid.limits[1:]]
        assert rates == sorted(rates) and rates[-1] > rates[0]
    for limit in grid.limits[1:]:
        rates = [reached[bandwidth, limit].best.rate for bandwidth in grid.bandwidths]
        assert all(more >= 0.98 * less for less, more in itertools.pairwise(rates))
        assert rates[-1] > 1.5 * rates[0]


def test_utilisation_is_the_models_flops_over_what_the_step_would_allow(traced):
    (point,) = sweep(traced, Grid(({"ranks": 4},), batches=(8,)), network(1e9))
    flops = 2 * 8 * WIDTH * WIDER * 5  # two products forward, three backward: none for x
    assert point.best.utilisation == pytest.approx(flops / 1e10 / point.best.said.step_seconds)
    assert point.samples_per_second(point.best) == pytest.approx(
        4 * 8 / point.best.said.step_seconds
    )
    fsdp = traced(8, None).uniform(Decision.SHARD_REGATHER, {"ranks": 4}, network(1e9)).prediction
    assert point.fsdp.said == fsdp


@pytest.mark.parametrize(
    ("hardware", "batch", "bound"),
    [
        (network(1e7), 8, Bound.BANDWIDTH),
        (network(1e12, latency_seconds=1e-2), 8, Bound.LATENCY),
        (network(1e10), 4096, Bound.COMPUTE),
    ],
)
def test_what_bounds_a_step_without_a_limit(traced, hardware, batch, bound):
    (point,) = sweep(traced, Grid(({"ranks": 4},), batches=(batch,)), hardware)
    assert point.bound is bound
    assert (point.without_bandwidth > 2) is (bound is Bound.BANDWIDTH)


def test_memory_bounds_what_more_of_it_would_make_faster(traced):
    """Also where that is by another batch size, which hides more."""
    grid = Grid(({"ranks": 4},), limits=(None,), batches=(8, 512))
    (free,) = sweep(traced, grid, network(1e9))
    assert free.best.batch == 512 and free.bound is not Bound.MEMORY
    peak = traced(8, None).plan({"ranks": 4}, network(1e9)).prediction.peak_bytes
    (point,) = sweep(traced, dataclasses.replace(grid, limits=(peak,)), network(1e9))
    assert point.best.batch == 8
    assert point.bound is Bound.MEMORY
    assert point.without_limit == pytest.approx(free.best.rate / point.best.rate)


def test_what_does_not_cross_the_network_is_planned_once(traced):
    said = []
    grid = Grid(({"ranks": 8}, {"ranks": 16}), bandwidths=(0.5, 1.0), batches=(8,))
    points = sweep(traced, grid, preset("h100-sxm"), said.append)
    assert points[0] == dataclasses.replace(points[1], bandwidth=0.5)
    assert points[2].best.rate < points[3].best.rate
    assert sum("no limit" in text for text in said) == 3


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of models, as the working directory."""
    (tmp_path / "swept_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("swept_models", None)


def run(*arguments: str) -> int:
    return main(["sweep", *arguments, "--hardware", "cpu-gloo"])


@pytest.mark.thorough
@pytest.mark.usefixtures("short_search")
def test_the_table_the_file_and_the_picture(here, capsys):
    pytest.importorskip("matplotlib")
    given = ["swept_models:any_length", "--world-sizes", "8,2", "--memory-limits", "500kB,2MB,1GB"]
    given += ["--sequence-lengths", "64,16", "--batch-sizes", "2"]
    assert run(*given, "--csv", "out/sweep.csv", "--picture", "out/sweep.png") == 0
    printed = capsys.readouterr().out
    for words in ("ranks", "tokens/s", "used", "gain", "bound by", "500 kB", "memory", "> "):
        assert words in printed
    assert (here / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with (here / "out" / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [
        (row["sequence_length"], row["world_size"], row["memory_limit_bytes"]) for row in rows
    ] == [
        (length, ranks, limit)
        for length in ("16", "64")
        for ranks in ("2", "8")
        for limit in ("500000", "2000000", "1000000000")
    ]
    for row in rows:
        if row["fits"] == "False":
            assert row["bound"] == "memory" and not row["step_seconds"]
            assert int(row["least_bytes"]) > int(row["memory_limit_bytes"])
            continue
        seconds = float(row["step_seconds"])
        tokens = int(row["world_size"]) * int(row["batch_size"]) * int(row["sequence_length"])
        assert float(row["tokens_per_second"]) == pytest.approx(tokens / seconds)
        assert int(row["peak_bytes"]) <= int(row["memory_limit_bytes"])
        if row["fsdp_fits"] == "True":
            ratio = float(row["fsdp_step_seconds"]) / seconds
            assert float(row["throughput_factor_over_fsdp"]) == pytest.approx(ratio)
    assert {row["fits"] for row in rows} == {"True", "False"}


def test_meshes_of_hosts_are_an_axis_too(here, capsys):
    given = ["swept_models:one_batch", "--mesh", "host=2,gpu=4", "--mesh", "host=4,gpu=4"]
    assert run(*given, "--csv", "sweep.csv") == 0
    with open("sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["mesh"], row["world_size"]) for row in rows] == [
        ("host=2,gpu=4", "8"),
        ("host=4,gpu=4", "16"),
    ]
    assert {row["batch_size"] + row["samples_per_second"] for row in rows} == {""}  # not known
    assert "4x4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swept_models:any_batch"], "give --world-sizes, or --mesh"),
        (["--world-sizes", "2"], "give MODULE:FUNCTION, or --hf-config"),
        (
            ["swept_models:one_batch", "--world-sizes", "2", "--batch-sizes", "2"],
            "takes no batch size",
        ),
        (
            ["swept_models:any_batch", "--world-sizes", "2", "--sequence-lengths", "8"],
            "takes no sequence length",
        ),
        (
            ["swept_models:any_batch", "--world-sizes", "2", "--picture", "sweep.xyz"],
            "sweep.xyz: its ending is none of",
        ),
        (
            ["swept_models:any_batch", "--world-sizes", "2", "--csv", "swept_models.py/sweep.csv"],
            "cannot write swept_models.py/sweep.csv",
        ),
    ],
)
def test_what_cannot_be_swept_is_said_in_a_line_before_planning(
    here, capsys, monkeypatch, arguments, said
):
    monkeypatch.setattr("osdp_compile.cli.model_arguments.trace", None)  # nothing gets that far
    if "--picture" in arguments:
        pytest.importorskip("matplotlib")
    assert run(*arguments) == 1
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bandwidths", "1x,2"], "'2' is not a multiple above zero, like 0.5x"),
        (["--bandwidths", "0x"], "'0x' is not a multiple above zero"),
        (["--memory-limits", "40GB,lots"], "'lots' is not a size"),
        (["--world-sizes", "8,x"], "'x' is not a whole number above zero"),
        (["--sequence-lengths", "0"], "'0' is not a whole number above zero"),
        (["--mesh", "2x8"], "'2x8' is not like host=2,gpu=8"),
    ],
)
def test_malformed_values_are_named(capsys, arguments, said):
    with pytest.raises(SystemExit) as stop:
        run("swept_models:any_batch", *arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_limits_are_shown_as_people_write_them():
    said = [limit_text(one) for one in (40 * 10**9, 1_500_000_000, 2**30, 8_000_000, None)]
    assert said == ["40 GB", "1.5 GB", "1 GiB", "8 MB", "none"]
