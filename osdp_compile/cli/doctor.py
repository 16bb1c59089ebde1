"""``osdp doctor``: what this machine has, and what will not work on it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from osdp_compile.calibration.kept_files import GRAPHS, PLANS, cache_folder, kept_files
from osdp_compile.cli.main import version
from osdp_compile.gpu_operators.gpu import gpu_of
from osdp_compile.torch_versions import TESTED, newer_than_tested, release
from passes.types.hardware import Hardware
from passes.types.hardware_presets import preset
from passes.types.units import format_bytes

Level = Literal["ok", "note", "problem"]
_STYLES: dict[Level, str] = {"ok": "green", "note": "yellow", "problem": "red"}

#: A program that Inductor compiles for the CPU.
_COMPILES = """
import torch
assert torch.equal(torch.compile(lambda x: x.sin() + 1)(torch.zeros(8)), torch.ones(8))
"""
_COMPILE_SECONDS = 300
#: Environment variables that change what a run does.
_VARIABLES = ("OSDP_CACHE_DIR", "OSDP_DEBUG", "OSDP_NATIVE_COLLECTIVES", "OMP_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fact about the machine.

    ``level``: ``problem``: training with this backend fails. ``note``: worth knowing.
    ``advice``: what to do; "": nothing.
    """

    subject: str
    text: str
    level: Level = "ok"
    advice: str = ""


def run(_: argparse.Namespace) -> int:
    """Print what the machine has; the exit status is 1 if something does not work."""
    findings = list(found())
    table = Table("", "found", "what to do", show_header=True)
    for one in findings:
        table.add_row(f"[{_STYLES[one.level]}]{one.subject}[/]", one.text, one.advice)
    Console().print(table)
    problems = [one for one in findings if one.level == "problem"]
    print(_counted(len(problems), "problem") if problems else "no problems found")
    return 1 if problems else 0


def found() -> Iterator[Finding]:
    """All findings, in the order in which they are shown."""
    yield _versions()
    yield _process_groups()
    yield _compiler()
    yield from _devices()
    yield _plans_for_gpus()
    yield from _cache()
    yield from _environment()


def _versions() -> Finding:
    newer = newer_than_tested(torch.__version__)
    if newer is not None:
        return Finding("versions", version(), "note", newer)
    if release(torch.__version__) < release(TESTED[0]):
        advice = f"Install torch {TESTED[0]} or newer."
        return Finding("versions", version(), "problem", advice)
    return Finding("versions", version())


def _process_groups() -> Finding:
    if not dist.is_available():
        advice = "Install a torch that is built with torch.distributed."
        return Finding("process groups", "none", "problem", advice)
    kinds = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    text = ", ".join(name for name, there in kinds.items() if there)
    if torch.cuda.is_available() and not kinds["nccl"]:
        advice = "Ranks on GPUs need NCCL: install a torch that has it."
        return Finding("process groups", text, "problem", advice)
    return Finding("process groups", text or "none", "ok" if text else "problem")


def _compiler() -> Finding:
    """Compile a small function as Inductor does for the CPU."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COMPILES],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        text = f"a small function did not compile in {_COMPILE_SECONDS} s"
        return Finding("compiler", text, "problem")
    if done.returncode == 0:
        return Finding("compiler", "Inductor compiles a small function for the CPU")
    lines = [line.strip() for line in done.stderr.splitlines() if "Error" in line]
    text = (lines or ["Inductor compiles nothing"])[0][:300]
    advice = "Inductor needs a C++ compiler (CXX names another than g++) and Python's headers."
    level: Level = "note" if torch.cuda.is_available() else "problem"
    return Finding("compiler", text, level, advice)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        known = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
        threads = _counted(torch.get_num_threads(), "thread")
        yield Finding("devices", f"CPU only: {_counted(cores, 'core')}, {threads}")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", f"{about.name}, {format_bytes(about.total_memory)}")


def _plans_for_gpus() -> Finding:
    """What ``osdp plan`` traces with for a GPU's profile."""
    gpu = gpu_of(preset("h100-sxm"))
    assert gpu is not None
    text = "steps are traced with a GPU's operators, without a GPU"
    if gpu.assumed:
        return Finding("plans for GPUs", f"{text}; {gpu.assumed} is assumed, this torch has none")
    return Finding("plans for GPUs", f"{text}; {gpu.cudnn_name} of this torch")


def _cache() -> Iterator[Finding]:
    folder = cache_folder()
    if folder is None:
        advice = "Every run measures and plans. Unset OSDP_CACHE_DIR to keep profiles and plans."
        yield Finding("profiles", "the cache is off", "note", advice)
        return
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    names = [_name_of(file) for file in files]
    yield Finding("profiles", f"{len(files)} in {folder}" + "".join(f"\n{one}" for one in names))
    for name in (PLANS, GRAPHS):
        own = folder / name
        sizes = [about.st_size for _, about in kept_files(own)] if own.is_dir() else []
        yield Finding(name, f"{len(sizes)} in {own}, {format_bytes(sum(sizes))}")
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    if not os.access(existing, os.W_OK):
        advice = "Set OSDP_CACHE_DIR to a folder that can be written."
        yield Finding("profiles", f"{existing} cannot be written", "note", advice)


def _name_of(file: Path) -> str:
    """A profile's file and name, and a line for each model that it learned from."""
    try:
        found = Hardware.load(file)
        learned = [f"\n  learned from {one.steps} steps: {one}" for one in found.learned.values()]
        return f"{file.name}: {found.name}" + "".join(learned)
    except ValueError:
        return f"{file.name}: not a profile of this version"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _environment() -> Iterator[Finding]:
    given = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    if given:
        yield Finding("environment", ", ".join(given))
    ranks = os.environ.get("WORLD_SIZE")
    if ranks is not None and ranks != "1":
        advice = "A script must call init_process_group before the model's first call."
        yield Finding("environment", f"WORLD_SIZE={ranks}", "note", advice)
