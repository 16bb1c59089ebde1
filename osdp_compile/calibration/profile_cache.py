"""Profiles: the hardware of a group, kept on disk between runs.

Measuring takes seconds at every first call, and its noise makes plans differ between runs
of one script. So a profile is kept in a folder, in a file whose name is a hash of what the
figures depend on: the ranks' machines, devices, threads, the address each has in the
network, the backend, the mesh if it has two levels, torch. What the key cannot see is a link
that was given another rate: a few messages tell, and then all is measured anew. The times of a
model's operators are added when it is first trained.

The folder is ``$OSDP_CACHE_DIR``, else ``$XDG_CACHE_HOME/osdp_compile``, else
``~/.cache/osdp_compile``. With ``OSDP_CACHE_DIR=""`` nothing is read or written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from osdp_compile.calibration.calibrate import device_name, measure_hardware
from osdp_compile.calibration.collective_times import rates_hold
from osdp_compile.errors import OsdpError
from osdp_compile.log_lines import ensure_visible
from osdp_compile.model.agreement import on_every_rank
from osdp_compile.runtime.collectives import backend_of
from osdp_compile.runtime.p2p import by_messages
from passes.types.hardware import Hardware

log = logging.getLogger("osdp_compile")

#: Counted up when measuring changes, so that older files are not found.
_FORMAT = 7
_MOST_SCRATCH_BYTES = 1 << 28
_in_process: dict[str, Hardware] = {}
_files: dict[str, Path] = {}  # where those are kept, on the rank that writes


def hardware_of(
    group: dist.ProcessGroup,
    device: torch.device,
    scratch_bytes: int,
    given: Hardware | None = None,
    dimension: str | None = None,
    along: Mapping[str, dist.ProcessGroup] | None = None,
) -> Hardware:
    """The profile of a group: as given, found earlier in this process, kept on disk, or measured.

    Collective. What is not given is the same on every rank; rank 0 alone reads and writes the
    file.

    Args:
        scratch_bytes: the most memory that measuring may take.
        given: what the user's options say.
        dimension: the name of the mesh dimension that the group is: what is given may have
            rates of its own for it.
        along: this rank's groups along the dimensions of a mesh of the group, by name: measuring
            finds rates along them too.

    Raises:
        OsdpError: on every rank, if what is given lacks a collective that the group needs.
    """
    if given is not None:
        ranks = {name: one.size() for name, one in (along or {}).items()}
        chosen = given.over(ranks or {"": group.size()}).along(dimension)
        return on_every_rank(lambda: _complete(chosen, group, device), group)
    known = _known(group, device, along)
    if known not in _in_process:
        _in_process[known] = _kept_or_measured(group, device, scratch_bytes, along)
    return _in_process[known]


def keep(
    hardware: Hardware,
    group: dist.ProcessGroup,
    device: torch.device,
    along: Mapping[str, dist.ProcessGroup] | None = None,
) -> None:
    """Keep a group's profile to which times of operators were added, for the next model or run.

    Every rank calls it with the same profile; who wrote the file writes it anew.
    """
    known = _known(group, device, along)
    if _in_process.get(known) == hardware:
        return
    _in_process[known] = hardware
    if known in _files:
        _write(hardware, _files[known])


def _known(
    group: dist.ProcessGroup, device: torch.device, along: Mapping[str, dist.ProcessGroup] | None
) -> str:
    return " ".join([group.group_name, device.type, *map(str, _sizes(along).items())])


def _sizes(along: Mapping[str, dist.ProcessGroup] | None) -> dict[str, int]:
    """Ranks along each dimension of a mesh, in their order."""
    return {name: one.size() for name, one in (along or {}).items()}


def cache_folder() -> Path | None:
    """Where profiles are kept; None if the cache is off."""
    asked = os.environ.get("OSDP_CACHE_DIR")
    if asked is not None:
        return Path(asked) if asked else None
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared) / "osdp_compile"
    try:
        return Path.home() / ".cache" / "osdp_compile"
    except RuntimeError:  # a user without a home
        return None


def _complete(given: Hardware, group: dist.ProcessGroup, device: torch.device) -> Hardware:
    """The profile, if it prices whatever the passes may emit for this group."""
    scatter = "all_to_all" if by_messages(group, device) else "reduce_scatter"
    needed = ("all_gather", scatter, "all_reduce") if dist.get_world_size(group) > 1 else ()
    missing = [kind for kind in needed if kind not in given.collectives]
    if missing:
        raise OsdpError(
            f"the hardware profile {given.name!r} has no {', '.join(missing)}. Was it measured on "
            "one process? Measure it under torchrun, or leave the option 'hardware' out."
        )
    return given


def _kept_or_measured(
    group: dist.ProcessGroup,
    device: torch.device,
    scratch_bytes: int,
    along: Mapping[str, dist.ProcessGroup] | None,
) -> Hardware:
    scratch_bytes = min(scratch_bytes, _MOST_SCRATCH_BYTES)
    if backend_of(group, device.type) == "fake":
        return measure_hardware(group, device, scratch_bytes=scratch_bytes, along=along)
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, _this_rank(device, scratch_bytes), group=group)
    writes = dist.get_rank(group) == 0
    path = _path(ranks, group, device, along) if writes else None
    known = _known(group, device, along)
    _files.pop(known, None)
    if path is not None:
        _files[known] = path
    if writes:
        ensure_visible(log)
    # Rank 0 decides for all: a rank that did not find the file would measure alone for ever.
    found: list[Any] = [_read(path)]
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    if found[0] is not None:
        kept = Hardware.from_dict(found[0])
        if rates_hold(kept, group, device, scratch_bytes):
            return kept
        if writes:
            log.info("the network is no longer what that profile says: measured anew")
    hardware = measure_hardware(group, device, scratch_bytes=scratch_bytes, along=along)
    if path is not None and _write(hardware, path):
        log.info("hardware measured, and kept in %s. To measure anew, delete it", path)
    return hardware


def _this_rank(device: torch.device, scratch_bytes: int) -> dict[str, Any]:
    """What the figures depend on at this rank."""
    return {
        "host": socket.gethostname(),
        "address": _own_address(),
        "interfaces": [
            os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        ],
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        # Little memory means small messages, which find other rates: in steps of four.
        "scratch": math.floor(math.log(max(scratch_bytes, 1), 4)),
    }


def _own_address() -> str:
    """The address from which this rank reaches the first one; "" without one.

    Ranks in network namespaces of one machine have one host name, and links of their own.
    """
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return ""
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: picks a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _path(
    ranks: list[Any],
    group: dist.ProcessGroup,
    device: torch.device,
    along: Mapping[str, dist.ProcessGroup] | None,
) -> Path | None:
    """The file of a group's profile; None if the cache is off."""
    folder = cache_folder()
    if folder is None:
        return None
    key = {
        "format": _FORMAT,
        "torch": torch.__version__,
        "device": device.type,
        "backend": backend_of(group, device.type),
        "members": dist.get_process_group_ranks(group),
        "world": dist.get_world_size(),
        "ranks": ranks,
    }
    if along:  # the order of the dimensions is that of the ranks
        key["mesh"] = list(_sizes(along).items())
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{device.type}-x{len(ranks)}-{digest[:16]}.json"


def _read(path: Path | None) -> dict[str, Any] | None:
    """A kept profile as JSON; None if there is none that can be read."""
    if path is None:
        return None
    try:
        hardware = Hardware.load(path)
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
    """Keep a profile. A folder that cannot be written costs time at the next run, no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another job may read or write the same file now: it sees all of it or nothing.
        handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        try:
            hardware.save(unfinished)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
    except OSError as error:
        log.info("the measured hardware profile is not kept: %s", error)
        return False
    return True
