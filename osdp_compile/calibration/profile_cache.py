"""Profile cache: the hardware profile of a group, kept on disk between runs.

A measurement takes seconds at every first call, and its noise makes the plans of one script differ
between runs. So a folder holds each profile in a file. The file's name is a hash of the figures'
inputs: the ranks' machines, devices, threads and network addresses, the backend, a two-dimensional
mesh, the version of torch. The hash does not show a changed link rate: a few messages check the
rate, and a difference starts a new measurement. The first training of a model adds the times of
its operators, and what its steps teach (``osdp_compile/tracking/learning.py``).

The folder: ``osdp_compile/calibration/kept_files.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from osdp_compile.calibration.calibrate import device_name, measure_hardware
from osdp_compile.calibration.collective_times import rates_hold
from osdp_compile.calibration.kept_files import cache_folder, read_own, write_own
from osdp_compile.errors import OsdpError
from osdp_compile.log_lines import ensure_visible
from osdp_compile.model.agreement import from_all, from_rank_zero, on_every_rank
from osdp_compile.runtime.collectives import Group, backend_of, name_of, rank_in, size_of
from osdp_compile.runtime.p2p import group_uses_p2p
from passes.types.hardware import Hardware
from passes.types.learned import Learned

log = logging.getLogger("osdp_compile")

#: Part of the hash; raised when the measurement changes, so that older files are not found.
_FORMAT = 8
_MOST_SCRATCH_BYTES = 1 << 28
_in_process: dict[str, Hardware] = {}
_files: dict[str, Path] = {}  # the profiles' files, on the rank that writes


def hardware_of(
    group: Group,
    device: torch.device,
    scratch_bytes: int,
    given: Hardware | None = None,
    dimension: str | None = None,
    along: Mapping[str, dist.ProcessGroup] | None = None,
    beside: Mapping[str, dist.ProcessGroup] | None = None,
    everyone: Group = None,
) -> Hardware:
    """A group's profile: given, known to this process, cached on disk, or measured. Collective.

    Without ``given`` every rank gets the same profile; only rank 0 reads and writes the file.

    Args:
        scratch_bytes: memory limit of the measurement.
        given: the profile of the user's options.
        dimension: the mesh dimension of the group; ``given`` may have rates for it.
        along: mesh dimension -> this rank's group along it; the measurement includes these.
        beside: the same for the dimensions of the model's own collectives.
        everyone: the ranks of the group and of ``beside`` together, which measure at once; None:
            there are no others than those of the group.

    Raises:
        OsdpError: on every rank, if ``given`` lacks a collective that the group needs.
    """
    if given is not None:
        ranks = {name: one.size() for name, one in (along or {}).items()}
        chosen = given.over(ranks or {"": size_of(group)}).along(dimension)
        return on_every_rank(lambda: _complete(chosen, group, device), group)
    if backend_of(group, device.type) == "fake":
        return measure_hardware(group, device, scratch_bytes=scratch_bytes, along=along)
    along = {**(along or {}), **(beside or {})}
    known = _known(group, device, along)
    if known not in _in_process:
        _in_process[known] = _kept_or_measured(group, device, scratch_bytes, along, everyone)
    return _in_process[known]


def keep(
    hardware: Hardware,
    group: Group,
    device: torch.device,
    along: Mapping[str, dist.ProcessGroup] | None = None,
) -> None:
    """Cache a group's profile with added operator times, for the next model or run.

    Every rank calls this with the same profile; the rank that writes the file updates it.
    """
    known = _known(group, device, along)
    if _in_process.get(known) == hardware:
        return
    _in_process[known] = hardware
    if known in _files:
        _write(hardware, _files[known])


def keep_learned(
    learned: Learned,
    step_key: str,
    hardware: Hardware,
    group: Group,
    device: torch.device,
    along: Mapping[str, dist.ProcessGroup] | None = None,
) -> Path | None:
    """Add what a training step teaches to a group's cached profile, for the next start. On rank 0.

    Other jobs may have added to the file; it is read again.

    Args:
        step_key: identifies the training step (``Hardware.for_step``).
        hardware: the profile that was corrected.

    Returns the file; None if there is none, or if it holds another measurement by now.
    """
    known = _known(group, device, along)
    path = _files.get(known)
    if path is None:
        return None
    try:
        current = Hardware.load(path)
    except (ValueError, OSError) as error:
        log.info("hardware profile %s learns nothing: %s", path, error)
        return None
    if current.without_steps() != hardware.without_steps():
        log.info("hardware profile %s was measured anew, and learns nothing from before", path)
        return None
    current = dataclasses.replace(current, learned={**current.learned, step_key: learned})
    if not _write(current, path):
        return None
    _in_process[known] = current
    return path


def _known(
    group: Group, device: torch.device, along: Mapping[str, dist.ProcessGroup] | None
) -> str:
    return " ".join([name_of(group), device.type, *map(str, _sizes(along).items())])


def _sizes(along: Mapping[str, dist.ProcessGroup] | None) -> dict[str, int]:
    """Mesh dimension -> its number of ranks, in order."""
    return {name: one.size() for name, one in (along or {}).items()}


def _complete(given: Hardware, group: Group, device: torch.device) -> Hardware:
    """Check that a profile has rates for all collectives that the passes may emit for the group."""
    scatter = "all_to_all" if group_uses_p2p(group, device) else "reduce_scatter"
    needed = ("all_gather", scatter, "all_reduce") if size_of(group) > 1 else ()
    missing = [kind for kind in needed if kind not in given.collectives]
    if missing:
        raise OsdpError(
            f"the hardware profile {given.name!r} has no {', '.join(missing)}. Was it measured on "
            "one process? Measure it under torchrun, or leave the option 'hardware' out."
        )
    return given


def _kept_or_measured(
    group: Group,
    device: torch.device,
    scratch_bytes: int,
    along: Mapping[str, dist.ProcessGroup] | None,
    everyone: Group,
) -> Hardware:
    scratch_bytes = min(scratch_bytes, _MOST_SCRATCH_BYTES)
    ranks = from_all(_this_rank(device, scratch_bytes), group)
    writes = rank_in(group) == 0
    path = _path(ranks, group, device, along) if writes else None
    known = _known(group, device, along)
    _files.pop(known, None)
    if path is not None:
        _files[known] = path
    if writes:
        ensure_visible(log)
    # Rank 0 decides for all: a rank without the file would measure alone and wait for ever.
    found = from_rank_zero(lambda: _read(path), group)
    kept = None if found is None else Hardware.from_dict(found)
    holds = kept is not None and rates_hold(kept, group, device, scratch_bytes)
    if kept is not None and not holds and writes:
        log.info("the network is no longer what that profile says: measured anew")
    if everyone is not None:  # a group beside this one measures together with it
        holds = all(from_all(holds, everyone))
    if kept is not None and holds:
        return kept
    hardware = measure_hardware(group, device, scratch_bytes=scratch_bytes, along=along)
    if path is not None and _write(hardware, path):
        log.info("hardware measured, and kept in %s. To measure anew, delete it", path)
    return hardware


def _this_rank(device: torch.device, scratch_bytes: int) -> dict[str, Any]:
    """This rank's inputs of the figures, for the hash."""
    return {
        "host": socket.gethostname(),
        "address": own_address(),
        "interfaces": [
            os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        ],
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        # Less memory means smaller messages, which have other rates: log base 4.
        "scratch": math.floor(math.log(max(scratch_bytes, 1), 4)),
    }


def own_address() -> str:
    """This rank's own address on the route to MASTER_ADDR; "": unknown.

    Ranks in network namespaces of one machine have the same host name, but different links.
    """
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return ""
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _path(
    ranks: list[Any],
    group: Group,
    device: torch.device,
    along: Mapping[str, dist.ProcessGroup] | None,
) -> Path | None:
    """The file of a group's profile; None: the cache is off."""
    folder = cache_folder()
    if folder is None:
        return None
    key = {
        "format": _FORMAT,
        "torch": torch.__version__,
        "device": device.type,
        "backend": backend_of(group, device.type),
        "members": [] if group is None else dist.get_process_group_ranks(group),
        "world": 1 if group is None else dist.get_world_size(),
        "ranks": ranks,
    }
    if along:  # the order of dimensions matters
        key["mesh"] = list(_sizes(along).items())
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{device.type}-x{len(ranks)}-{digest[:16]}.json"


def _read(path: Path | None) -> dict[str, Any] | None:
    """A cached profile as JSON; None: no readable file."""
    if path is None:
        return None
    try:
        hardware = Hardware.from_dict(json.loads(read_own(path)))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        log.info("hardware profile %s is of no use and measured anew: %s", path, error)
        return None
    log.info(
        "hardware profile: %s (%s). To measure anew, delete it; OSDP_CACHE_DIR='' keeps none",
        path,
        hardware.source,
    )
    return hardware.to_dict()


def _write(hardware: Hardware, path: Path) -> bool:
    """Write a profile; return whether it worked. A failure only costs time at the next run."""
    try:
        write_own(path, json.dumps(hardware.to_dict(), indent=1))
    except OSError as error:
        log.info("the measured hardware profile is not kept: %s", error)
        return False
    return True
