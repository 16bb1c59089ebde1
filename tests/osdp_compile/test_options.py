"""Options: each malformed one is a ValueError that lists what is allowed. No process group."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import osdp_compile
from osdp_compile import OsdpError, Plan, _torch
from osdp_compile.options import _READERS, DESCRIBED, CheckedOptions, Options, with_mode
from passes.pipeline import default_passes
from passes.types.hardware import generic
from passes.types.hardware_presets import preset
from passes.types.units import parse_bytes
from tests.boxed import without_inductor


def call_with(**options):
    """What a user does: compile a model and call it."""
    torch._dynamo.reset()
    return torch.compile(nn.Linear(2, 2), backend="osdp", options=options)(torch.ones(1, 2))


def test_an_unknown_option_lists_all_that_are_known():
    with pytest.raises(ValueError) as error:
        call_with(memory_limits="1GiB")
    text = str(error.value)
    assert "unknown option 'memory_limits'" in text
    assert "Did you mean 'memory_limit'?" in text
    options = ("memory_limit", "mesh", "optimizer", "plan", "hardware", "slices", "debug", "passes")
    for option in options:
        assert f"'{option}'" in text


@pytest.mark.parametrize(
    ("option", "value", "said", "allowed"),
    [
        ("memory_limit", "8 gallons", "'8 gallons' is not a size", "'8GiB'"),
        ("memory_limit", "8", "'8' is 8 bytes: did you mean '8GiB'?", "'8GiB'"),
        ("memory_limit", " 16384 ", "did you mean '16384MiB'?", "'8GiB'"),
        ("memory_limit", 80, "80 is 80 bytes: did you mean '80GiB'?", "'8GiB'"),
        ("memory_limit", 0, "must be above zero", "'500MB'"),
        ("memory_limit", 1.5, "1.5 is not a size", "a whole number"),
        ("memory_limit", True, "True is not a size", "a whole number"),
        ("mesh", "world", "'world' is not a DeviceMesh", "DeviceMesh over the data-parallel ranks"),
        ("optimizer", "adamwest", "'adamwest' is not one of", "adamw"),
        ("optimizer", -1, "below zero", "bytes for each element"),
        ("optimizer", 1.5, "neither a number of bytes nor a name", "'adamw'"),
        ("plan", 3, "neither a Plan nor a path", "osdp_compile.Plan"),
        ("plan", "no/such/plan.json", "No such file", "the path of a saved one"),
        ("hardware", 3, "neither a Hardware nor a path", "osdp_compile.Hardware"),
        ("hardware", "h100", "preset nor a file. Did you mean 'h100-sxm'?", "h100-sxm, h200"),
        ("hardware", "nothing", "'nothing' is neither a preset nor a file.", "h100-sxm, h200"),
        ("hardware", "no/such.json", "No such file or directory: 'no/such.json'", "h100-sxm"),
        ("slices", "four", "neither 1 nor a mapping", "'blocks.*.up.weight': 4"),
        ("slices", 4, "neither 1 nor a mapping", "'blocks.*.up.weight': 4"),
        ("search", "deep", "'deep' is neither 'quick' nor 'thorough'", "under lower limits too"),
        ("slices", {"up": 0}, "'up': 0 is not a number of slices", "'blocks.*.up.weight': 4"),
        ("slices", {"up": (4, 1.0)}, "(4, 1.0) is not a number of slices", "(4, 1) to keep one"),
        ("slices", {"up": (4, 4)}, "'up': (4, 4) keeps 4 of 4 slices", "(4, 1) to keep one"),
        ("inductor", 3, "3 is neither a mapping of settings nor the name of a mode", "a mode"),
        ("inductor", "fastest", "'fastest' is no mode of torch.compile", "max-autotune-no"),
        ("inductor", {"max_autotunes": True}, "Did you mean 'max_autotune'?", "max_autotune"),
        ("inductor", {"max_autotune": 1}, "'max_autotune' is bool, not 1", "max_autotune"),
        ("inductor", {"allow_buffer_reuse": True}, "would undo the plan's schedule", "settings"),
        ("inductor", {"reorder_for_peak_memory": True}, "undo the plan's schedule", "settings"),
        ("inductor", {"triton.cudagraphs": True}, "CUDA graphs hold memory", "settings"),
        ("inductor", {"combo_kernels": True}, "changes the memory", "settings"),
        ("debug", 3, "neither True, False nor a folder", "a folder"),
        ("passes", ["bucket"], "not a list of passes.pipeline.Pass", "default_passes()"),
        ("passes", default_passes()[2:], "needs", "default_passes()"),
    ],
)
def test_a_malformed_value_reaches_the_user_as_a_value_error(option, value, said, allowed):
    with pytest.raises(ValueError) as error:
        call_with(**{option: value})
    text = str(error.value)
    assert f"option '{option}'" in text and said in text
    assert allowed in text.split("Allowed: ")[1]
    assert "Errno" not in text and "TORCHDYNAMO" not in text


@pytest.mark.parametrize("value", ["8B", "3KiB", "1MiB", "1048576", 1 << 16, "8589934592"])
def test_a_small_limit_is_taken_if_it_has_a_unit_or_is_no_slip(value):
    assert CheckedOptions.parse({"memory_limit": value}).memory_limit_bytes == parse_bytes(value)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("max-autotune", "'triton.cudagraphs': True is refused: CUDA graphs hold memory"),
        ("reduce-overhead", "'triton.cudagraphs': True is refused: CUDA graphs hold memory"),
        ("fast", "'fast' is no mode of torch.compile"),
    ],
)
def test_a_mode_that_is_not_honoured_says_which_is(mode, why):
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="takes mode='default' and mode='max-aut") as error:
        torch.compile(nn.Linear(2, 2), backend="osdp", mode=mode)(torch.ones(1, 2))
    assert why in str(error.value) and "'memory_limit': '8GiB'}" in str(error.value)


def test_a_mode_is_the_option_of_that_name():
    tuned = {"max_autotune": True, "coordinate_descent_tuning": True}
    name = "max-autotune-no-cudagraphs"
    assert CheckedOptions.parse(with_mode(None, name)).inductor == tuned
    assert CheckedOptions.parse({"inductor": name}).inductor == tuned
    assert CheckedOptions.parse(with_mode(None, "default")).inductor is None


def seen_by_inductor(**options):
    """Inductor's settings while it compiles a forward and a backward."""
    torch._dynamo.reset()
    seen = []

    def compile_inner(gm, inputs, **_):
        seen.append(_torch.inductor.settings())
        return make_boxed_func(gm.forward)

    with mock.patch.object(_torch.inductor, "compile_fx_inner", compile_inner):
        model = torch.compile(nn.Linear(2, 2), backend="osdp", options=options)
        model(torch.ones(1, 2)).sum().backward()
    return seen


@pytest.mark.parametrize("spelled", ["max_autotune", "max-autotune"])
def test_settings_reach_inductor_for_forward_and_backward(spelled):
    own = {spelled: True, "max_fusion_size": 8, "allow_buffer_reuse": False}
    found = seen_by_inductor(memory_limit="1GiB", hardware=generic(), inductor=own)
    assert len(found) == 2
    for one in found:
        assert one["max_autotune"] and one["max_fusion_size"] == 8
        assert not one["allow_buffer_reuse"] and not one["reorder_for_peak_memory"]
    assert not _torch.inductor.settings()["max_autotune"]


def test_settings_reach_inductor_where_nothing_is_planned():
    with mock.patch.object(_torch.inductor, "compile_fx") as compile_fx:
        compile_fx.return_value = lambda *args: (torch.ones(1, 2),)
        call_with(inductor="max-autotune-no-cudagraphs")
    patches = compile_fx.call_args.kwargs["config_patches"]
    assert patches == {"max_autotune": True, "coordinate_descent_tuning": True}


def test_another_setting_at_a_later_compilation_is_refused():
    torch._dynamo.reset()
    model = nn.Linear(2, 2)
    with without_inductor():
        given = {"memory_limit": "1GiB", "hardware": generic()}
        torch.compile(model, backend="osdp", options=given)(torch.ones(1, 2))
        torch._dynamo.reset()
        later = torch.compile(model, backend="osdp", options={"inductor": {"max_autotune": True}})
        with pytest.raises(OsdpError, match="'inductor' is another than at the model's first"):
            later(torch.ones(1, 2))


def test_the_default_mode_is_taken(inductor_cache, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    torch._dynamo.reset()
    model, batch = nn.Linear(2, 2), torch.ones(1, 2)
    compiled = torch.compile(model, backend="osdp", mode="default")
    torch.testing.assert_close(compiled(batch), model(batch))


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"format": 0}', '{"format": 1}'])
def test_a_file_that_holds_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="option 'plan'"):
        call_with(plan=tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["not json", "[]", "{}"])
def test_a_file_that_holds_no_hardware_profile_is_refused(tmp_path, text):
    (tmp_path / "hardware.json").write_text(text)
    with pytest.raises(ValueError, match="option 'hardware'"):
        call_with(hardware=str(tmp_path / "hardware.json"))


def test_the_name_of_a_preset_is_a_profile(tmp_path, monkeypatch):
    assert CheckedOptions.parse({"hardware": "h100-sxm"}).hardware == preset("h100-sxm")
    monkeypatch.chdir(tmp_path)
    generic().save("h200")
    assert CheckedOptions.parse({"hardware": "h200"}).hardware == preset("h200")
    assert CheckedOptions.parse({"hardware": "./h200"}).hardware == generic()


def test_well_formed_options_are_read(tmp_path):
    plan = Plan.uniform([("weight", torch.empty(4, 2))], "shard_keep", world_size=2)
    plan.save(tmp_path / "plan.json")
    generic().save(tmp_path / "hardware.json")
    options = CheckedOptions.parse(
        {
            "memory_limit": "1.5 GiB",
            "optimizer": "AdamW",
            "plan": tmp_path / "plan.json",
            "hardware": str(tmp_path / "hardware.json"),
            "debug": str(tmp_path),
            "passes": default_passes(),
            "mesh": None,
        }
    )
    assert options.memory_limit_bytes == 3 << 29
    assert options.optimizer == "adamw"
    assert options.plan == plan
    assert options.hardware == generic()
    assert options.debug == tmp_path
    assert options.passes == tuple(default_passes())
    assert options.mesh is None
    assert CheckedOptions.parse(None) == CheckedOptions() == CheckedOptions.parse({})


def test_a_plan_keeps_the_limit_it_was_made_for(tmp_path):
    plan = Plan.uniform([("weight", torch.empty(4, 2))], "shard_keep", world_size=2)
    limited = plan.replace(memory_limit_bytes=1 << 20)
    limited.save(tmp_path / "plan.json")
    assert CheckedOptions.parse({"plan": plan}).memory_limit_bytes is None
    assert CheckedOptions.parse({"plan": tmp_path / "plan.json"}).memory_limit_bytes == 1 << 20
    assert (
        CheckedOptions.parse({"plan": limited, "memory_limit": "2 MiB"}).memory_limit_bytes
        == 2 << 20
    )
    assert CheckedOptions().with_plan(limited).memory_limit_bytes == 1 << 20


@pytest.mark.parametrize(
    ("said", "debug"), [("0", False), ("", False), ("1", True), ("graphs", Path("graphs"))]
)
def test_the_environment_turns_debugging_on_everywhere(monkeypatch, said, debug):
    monkeypatch.setenv("OSDP_DEBUG", said)
    assert CheckedOptions.parse({}).debug == debug
    assert CheckedOptions.parse({"debug": "elsewhere"}).debug == Path("elsewhere")


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("host", "gpu", "tensor"),
            r"3 dimensions, one or two .*\['host'\], or mesh\['host', 'gpu'\]",
        ),
        (("host", "gpu"), None),
    ],
)
def test_a_mesh_of_three_dimensions_is_refused_with_advice(world_of_one, names, said):
    mesh = init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    if said is None:
        assert CheckedOptions.parse({"mesh": mesh}).mesh is mesh
        return
    with pytest.raises(ValueError, match=said):
        call_with(mesh=mesh)


def test_a_mesh_of_two_dimensions_needs_names(world_of_one):
    with pytest.raises(ValueError, match="two dimensions without names"):
        call_with(mesh=init_device_mesh("cpu", (1, 1)))


@pytest.fixture
def nothing_said_yet(monkeypatch, inductor_cache):
    monkeypatch.setattr("osdp_compile.engine.backend._said", set())
    monkeypatch.setenv("WORLD_SIZE", "1")  # as torchrun sets it for one process
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    torch._dynamo.reset()


def trains_alone(caplog, why):
    """Train two models with osdp in this process; assert that it says why nothing is sharded."""
    with caplog.at_level(logging.INFO, logger="osdp_compile"):
        for _ in range(2):
            model = nn.Linear(2, 2)
            wanted = model(torch.ones(1, 2))
            compiled = torch.compile(model, backend="osdp")
            output = compiled(torch.ones(1, 2))
            torch.testing.assert_close(output, wanted)
            output.sum().backward()
            assert all(type(p) is nn.Parameter for p in model.parameters())
            assert model.weight.grad is not None
    (said,) = [r.message for r in caplog.records if r.name == "osdp_compile"]
    assert why in said and "Inductor" in said


def test_without_a_process_group_inductor_compiles_and_it_is_said_once(nothing_said_yet, caplog):
    trains_alone(caplog, "no process group")


def test_one_of_several_ranks_without_a_process_group_is_refused(nothing_said_yet, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(2, 2)
    wanted = r"WORLD_SIZE=2 .*init_process_group\(\) before"
    with pytest.raises(OsdpError, match=wanted):
        torch.compile(model, backend="osdp")(torch.ones(1, 2))
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=2)
    with pytest.raises(OsdpError, match=wanted):
        osdp_compile.shard(model, plan)


def test_in_a_world_of_one_inductor_compiles_and_it_is_said_once(
    world_of_one, nothing_said_yet, caplog
):
    trains_alone(caplog, "a world of one")


def in_a_fresh_process(script):
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.thorough
def test_who_configures_no_logging_sees_it_too(inductor_cache, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    done = in_a_fresh_process(
        "import torch\n"
        "for _ in range(2):\n"
        "    compiled = torch.compile(torch.nn.Linear(2, 2), backend='osdp')\n"
        "    compiled(torch.ones(1, 2)).sum().backward()\n"
    )
    assert done.stderr.count("compiling with Inductor") == 1


def test_the_backend_is_found_by_name_without_importing_the_package():
    done = in_a_fresh_process(
        "import sys, torch\n"
        "assert 'osdp' in torch._dynamo.list_backends(exclude_tags=())\n"
        "assert 'osdp_compile' not in sys.modules\n"
        "compiled = torch.compile(torch.nn.Linear(2, 2), backend='osdp', options={'limit': 1})\n"
        "try:\n"
        "    compiled(torch.ones(1, 2))\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    assert "unknown option 'limit'" in done.stdout


def test_a_plan_that_is_given_is_not_searched_for():
    with pytest.raises(ValueError, match="none is searched for"):
        CheckedOptions.parse({"plan": Plan((), world_size=2), "search": "thorough"})
    assert CheckedOptions.parse({"search": "thorough"}).search == "thorough"
    assert (
        CheckedOptions.parse({"plan": Plan((), world_size=2), "search": "quick"}).plan is not None
    )


def test_slices_are_said_once():
    plan = Plan.uniform(nn.Linear(2, 2).named_parameters(), "shard_regather", world_size=2)
    with pytest.raises(ValueError, match="says what runs in slices"):
        CheckedOptions.parse({"plan": plan, "slices": 1})
    assert CheckedOptions.parse({"slices": 1}).slices == {}
    assert CheckedOptions.parse({"slices": {"*.weight": 2}}).slices == {"*.weight": 2}
    kept = CheckedOptions.parse({"slices": {"up": (4, 1), "down": [2, 0]}}).slices
    assert kept == {"up": (4, 1), "down": 2}
    assert CheckedOptions.parse({}).slices is None


def test_the_typed_form_has_every_option_and_is_a_dict():
    assert set(Options.__annotations__) == set(DESCRIBED) == set(_READERS)
    given = Options(memory_limit="8GiB", search="thorough")
    assert given == {"memory_limit": "8GiB", "search": "thorough"}
    assert CheckedOptions.parse(given).memory_limit_bytes == 8 << 30
