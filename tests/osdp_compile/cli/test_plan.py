"""``osdp plan``: what it prints, saves and refuses."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import osdp_compile
from osdp_compile import Plan
from osdp_compile.cli.main import main

pytestmark = pytest.mark.usefixtures("short_search")

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x, *, scale=1.0):
        return (scale * self.down(self.up(x).relu())).square().mean()

class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 16, 3, 1, 64).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.float().square().mean()

def attending():
    return Attending().bfloat16(), (torch.empty(2, 16, 64, dtype=torch.bfloat16),)

def any_batch(batch):
    return Net(), (torch.empty(batch, 512),)

def one_batch():
    return Net(), (torch.empty(8, 512),), {"scale": 2.0}

def no_batch():
    return Net()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of models, as the working directory."""
    (tmp_path / "models_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("models_of_mine", None)


def run(*arguments: str, hardware: str = "cpu-gloo") -> int:
    return main(["plan", *arguments, "--hardware", hardware])


def test_the_plan_its_prediction_and_the_alternatives(here, capsys):
    given = ["models_of_mine:one_batch", "--world-size", "8", "--memory-limit", "16MB"]
    assert run(*given, "--out", "plan.json") == 0
    printed = capsys.readouterr().out
    plan = Plan.load(here / "plan.json")
    assert plan.world_size == 8 and plan.memory_limit_bytes == 16_000_000
    assert plan.prediction.peak_bytes <= 16_000_000
    assert [row.name for row in plan.parameters] == [
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    ]
    for words in (
        "osdp plan for 8 ranks",
        "up.weight",
        "predicted step",
        "predicted peak",
        "DDP: replicate all",
        "ZeRO-2: shard all, keep",
        "FSDP: shard all, regather",
        "options={'plan': 'plan.json'}",
    ):
        assert words in printed
    ddp = next(line for line in printed.splitlines() if "DDP: replicate" in line)
    assert " no " in ddp  # 8.4 MB of parameters and as much of gradients, 16.8 of state


@pytest.mark.thorough
def test_a_plan_for_gpus_says_whose_operators_it_has(here, capsys):
    given = ["models_of_mine:attending", "--world-size", "8"]
    assert run(*given, hardware="h100-sxm") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Traced without a GPU, with the operators of compute capability 9.0" in printed
    assert "Attention: _scaled_dot_product_cudnn_attention." in printed
    assert run(*given) == 0
    assert "Traced" not in capsys.readouterr().out


def test_the_page_is_written_with_the_plan_and_the_alternatives(here, capsys):
    pytest.importorskip("bokeh")
    given = ["models_of_mine:one_batch", "--world-size", "8", "--memory-limit", "16MB"]
    assert run(*given, "--html", "report/plan.html") == 0
    assert "Open report/plan.html in a browser" in capsys.readouterr().out
    page = (here / "report" / "plan.html").read_text()
    for words in ("models_of_mine:one_batch on 8 ranks", "up.weight", "DDP: replicate all"):
        assert words in page
    assert "FILE --html FILE</code> plans under other limits too" in page


def test_what_runs_in_slices_is_said_by_hand(here, capsys):
    given = ["models_of_mine:one_batch", "--world-size", "8", "--memory-limit", "16MB"]
    assert run(*given, "--slices", "up.weight=4:1", "--out", "plan.json") == 0
    found = {row.name: row for row in Plan.load(here / "plan.json").parameters}
    for name in ("up.weight", "down.weight"):  # the one is sliced with the other
        assert (found[name].slices, found[name].kept_slices) == (4, 1)
    assert run(*given, "--slices", "1", "--out", "plan.json") == 0
    assert {row.slices for row in Plan.load(here / "plan.json").parameters} == {1}
    capsys.readouterr()
    assert run(*given, "--slices", "nothing=4") != 0
    assert "no parameter's name matches 'nothing'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(*given, "--slices", "up.weight=four")
    assert "'up.weight=four' is not like up.weight=4" in capsys.readouterr().err


def test_a_batch_size_is_passed_on(here, capsys):
    saved = []
    for batch in ("4", "64"):
        arguments = ["models_of_mine:any_batch", "--batch-size", batch, "--world-size", "4"]
        assert run(*arguments, "--out", "plan.json") == 0
        saved.append(Plan.load(here / "plan.json").prediction)
    assert saved[0].compute_seconds < saved[1].compute_seconds
    assert saved[0].peak["activations"] < saved[1].peak["activations"]


@pytest.mark.thorough
def test_the_batch_size_of_the_highest_throughput(here, capsys):
    arguments = ["models_of_mine:any_batch", "--world-size", "8", "--memory-limit", "24MB"]
    assert run(*arguments, "--batch-sizes", "1,64,100000", "--out", "plan.json") == 0
    printed = capsys.readouterr().out
    assert "100000" in printed and "does not fit" in printed
    assert Plan.load(here / "plan.json").prediction.peak_bytes <= 24_000_000
    assert run(*arguments, "--batch-sizes", "auto", "--out", "auto.json") == 0
    found, given = (Plan.load(here / name).prediction for name in ("auto.json", "plan.json"))
    # More rows hide more: the search ends at the largest that fits, not at the first.
    assert found.compute_seconds > given.compute_seconds
    assert found.peak_bytes <= 24_000_000


@pytest.mark.thorough
def test_step_time_against_memory(here, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["models_of_mine:one_batch", "--world-size", "8", "--frontier", "frontier.png"]
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert "step time against memory" in printed.out
    # A log has a line for each thing that is done, and how long the rest will take.
    for words in ("osdp plan: tracing", "osdp plan: planning", "osdp plan: pricing the"):
        assert words in printed.err
    assert "osdp plan --frontier: limit 1 of 9, " in printed.err and " left" in printed.err
    assert (here / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_the_plan_is_there_before_the_frontier_is_drawn(here, capsys, monkeypatch):
    pytest.importorskip("matplotlib")

    def interrupted(*given, **named):
        assert Plan.load(here / "plan.json").prediction is not None
        assert "Saved. To use it" in capsys.readouterr().out
        raise KeyboardInterrupt

    monkeypatch.setattr("osdp_compile.cli.plan.frontier", interrupted)
    given = ["models_of_mine:one_batch", "--world-size", "8", "--frontier", "frontier.png"]
    with pytest.raises(KeyboardInterrupt):
        run(*given, "--out", "plan.json")


def test_files_that_cannot_be_written_are_said_before_planning(here, capsys):
    (here / "file").write_text("in the way")
    given = ["models_of_mine:one_batch", "--world-size", "8", "--out", "file/plan.json"]
    assert run(*given) == 1
    said = capsys.readouterr().err
    assert "cannot write" in said and "planning" not in said


def test_a_type_to_gather_in(here, capsys):
    given = ["models_of_mine:one_batch", "--world-size", "8", "--out", "plan.json"]
    assert run(*given, "--param-dtype", "bfloat16", "--reduce-dtype", "float32") == 0
    in_bf16 = Plan.load(here / "plan.json")
    model = sys.modules["models_of_mine"].Net()
    batch, scale = (torch.empty(8, 512),), {"scale": 2.0}
    types = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    expected = osdp_compile.plan(model, batch, scale, world_size=8, hardware="cpu-gloo", **types)
    assert in_bf16 == expected
    assert run(*given) == 0
    assert Plan.load(here / "plan.json").prediction.step_seconds > in_bf16.prediction.step_seconds
    assert run(*given, "--param-dtype", "int8") == 1
    assert "argument --param-dtype" in capsys.readouterr().err


def test_a_mesh_of_hosts(here, capsys):
    arguments = ["models_of_mine:one_batch", "--mesh", "host=2,gpu=8"]
    assert run(*arguments, "--out", "plan.json", hardware="h100-sxm") == 0
    assert Plan.load(here / "plan.json").world_size == 16


@pytest.mark.thorough
def test_a_hugging_face_model_by_its_configuration(here, capsys):
    pytest.importorskip("transformers")
    (here / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 256,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
        )
    )
    arguments = ["--hf-config", ".", "--sequence-length", "32", "--world-size", "16"]
    assert run(*arguments, "--out", "plan.json", hardware="h100-sxm") == 0
    plan = Plan.load(here / "plan.json")
    assert {row.dtype for row in plan.parameters} == {"bfloat16"}
    assert plan["model.layers.1.mlp.up_proj.weight"].shape == (128, 64)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give MODULE:FUNCTION, or --hf-config"),
        (["models_of_mine"], "not like MODULE:FUNCTION"),
        (["nowhere:f"], "No module named 'nowhere'"),
        (["models_of_mine:f"], "has no attribute 'f'"),
        (["models_of_mine:no_batch"], "returned no"),
        (["models_of_mine:one_batch", "--batch-size", "2"], "takes no batch size"),
        (["models_of_mine:one_batch", "--memory-limit", "1kB"], "least possible"),
        (["models_of_mine:any_batch", "--batch-sizes", "auto"], "needs a memory limit"),
        (["models_of_mine:one_batch", "--optimizer", "adamv"], "argument --optimizer: optimizer"),
        (["models_of_mine:one_batch", "--param-dtype", "int8"], "argument --param-dtype: 'int8'"),
        (["models_of_mine:one_batch", "--slices", "x=4"], "argument --slices: no parameter's name"),
        (["models_of_mine:one_batch", "--slices", "0.*=0"], "argument --slices: '0.*': 0 is not a"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(here, capsys, arguments, said):
    assert run(*arguments, "--world-size", "4") == 1
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert "Traceback" not in error


def test_an_unknown_profile_is_said_by_its_argument(here, capsys):
    assert run("models_of_mine:one_batch", "--world-size", "4", hardware="h10") == 1
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("osdp plan: argument --hardware: 'h10' is neither a preset nor a file")
    assert "Allowed" not in error


@pytest.mark.parametrize("ranks", [[], ["--world-size", "8", "--mesh", "host=2,gpu=4"]])
def test_the_number_of_ranks_is_given_once(here, capsys, ranks):
    assert run("models_of_mine:one_batch", *ranks) == 1
    assert "give --world-size, or --mesh, and not both" in capsys.readouterr().err
