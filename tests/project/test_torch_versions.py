"""Versions of torch: a newer one is said once, a missing private name is one clear message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn

from osdp_compile import _torch
from osdp_compile.engine import backend
from osdp_compile.options import CheckedOptions
from osdp_compile.torch_versions import TESTED, newer_than_tested, release
from osdp_compile.trace import fake_world
from passes.graph.metadata import MODULE_KEYS
from tests.chosen import thorough
from tests.training import SLOW
from tools import compat, environment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", [*TESTED, "2.13.1+cpu", "2.15.3", "2.15.0a0+git1234"])
def test_tested_versions_and_their_fixes_are_not_newer(version):
    assert newer_than_tested(version) is None


@pytest.mark.inductor
@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270101+cu132", "3.0.0"])
def test_a_newer_version_is_warned_of_once_and_compiles(version):
    torch.compiler.reset()
    model = torch.compile(nn.Linear(3, 2), backend="osdp", dynamic=False)
    with (
        mock.patch.object(torch, "__version__", version),
        mock.patch.object(backend, "_said", set()),
        mock.patch.object(backend.log, "warning") as warning,
    ):
        for rows in (2, 3):  # each is compiled
            model(torch.ones(rows, 3)).sum().backward()
    (said,) = [call.args[0] for call in warning.call_args_list]
    assert f"torch {version} is newer than {TESTED[-1]}" in said


def test_inductors_cache_key_holds_nothing_of_the_passes():
    """What the planner keeps on a graph holds operators, which torch 2.11 cannot pickle."""
    kept = []

    def inner(gm, inputs, **kwargs):
        kept.append([key.name for key in MODULE_KEYS if key.is_set(gm)])
        return make_boxed_func(gm.forward)

    def compiled(gm, inputs):
        return backend.compile_graph(gm, inputs, CheckedOptions.parse({"hardware": SLOW}), inner)

    torch.compiler.reset()
    with fake_world(2):
        model = torch.compile(nn.Linear(8, 8), backend=compiled)
        model(torch.ones(2, 8)).sum().backward()
    torch.compiler.reset()
    assert kept == [[], []]


REMOVED = """
import torch._dynamo.eval_frame as module
del module.skip_code
"""


@pytest.mark.parametrize(
    "use",
    [
        *thorough("import osdp_compile.engine.backend"),
        "from osdp_compile import Plan",
    ],
)
def test_a_private_name_that_is_not_there_is_one_clear_message(use):
    done = subprocess.run(
        [sys.executable, "-c", REMOVED + use],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last == (
        "ImportError: osdp_compile needs torch._dynamo.eval_frame.skip_code, which torch "
        f"{torch.__version__} does not have. Tested versions: {', '.join(TESTED)}"
    )
    assert "The above exception" not in done.stderr


def test_versions_are_named_once():
    assert environment.tested() == TESTED
    assert list(map(release, TESTED)) == sorted(map(release, TESTED))
    lowest = ".".join(map(str, release(TESTED[0])))
    assert f'"torch>={lowest}",' in (ROOT / "pyproject.toml").read_text()
    assert f"install {TESTED[-1]}, the newest tested one" in (ROOT / "README.md").read_text()


def test_the_core_is_there_and_a_row_says_what_pytest_said():
    assert not [test for test in compat.CORE if not (ROOT / test).exists()]
    said = "...\n3 failed, 728 passed, 1 skipped, 14 warnings in 508.77s (0:08:28)\n"
    assert compat.row("2.15.0", compat.counts(said), 8.5) == "| 2.15.0 | 728 | 3 | 1 | 8 min |"
    assert "did not get to its end" in compat.row("2.15.0", compat.counts("Killed"), 1)


@pytest.mark.thorough
def test_an_environment_keeps_a_torch_that_is_there_and_follows_the_one_beside_python(tmp_path):
    said = environment.make(tmp_path / "new", None)
    own = environment.own_torch()
    assert said == f"uses torch {own} of {sys.prefix}"
    assert environment.torch_in(tmp_path / "new") == own
    assert environment.make(tmp_path / "new", None).startswith(f"keeps torch {own}")
    # One that is made by that environment follows the same torch.
    script, newer = ROOT / "tools" / "environment.py", tmp_path / "newer"
    subprocess.run([environment.python_of(tmp_path / "new"), script, newer], check=True)
    assert environment.torch_in(newer) == own


def test_inductor_is_told_to_keep_the_order_by_settings_that_it_has():
    known = torch._inductor.config.get_config_copy()
    assert {"reorder_for_peak_memory", "reorder_for_locality"} <= set(_torch.inductor.KEEP_ORDER)
    assert set(_torch.inductor.KEEP_ORDER) <= set(known)
    simple_overlap = "aten_distributed_optimizations.enable_simple_overlap"
    assert (simple_overlap in _torch.inductor.KEEP_ORDER) == (release(torch.__version__) >= (2, 14))
