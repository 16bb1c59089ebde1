"""The hardware profile: rates of the device and of the network, for the cost model."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from passes.types.decode import decoded
from passes.types.learned import Learned

# Finite: JSON in Python has Infinity.
_MOST = sys.float_info.max
Seconds = Annotated[float, Meta(ge=0, le=_MOST)]
#: A divisor.
Rate = Annotated[float, Meta(gt=0, le=_MOST)]
Count = Annotated[int, Meta(ge=0)]

#: Bytes that AdamW's step moves for each byte of parameter, gradient and state outside caches:
#: torch runs nine operators that read and write 88 bytes for 16.
UPDATE_PASSES = 5.5

#: A block of more than 1 MiB of CUDA's allocator may be up to 1 MiB larger than its tensor. The
#: rests of all blocks together took up to 7 MiB on an H100 and an H200.
BLOCK_RESTS_BYTES = 8 << 20

#: Fields of a link by their names in older profiles.
_RENAMED = {
    "busy_seconds_per_byte": "overhead_seconds_per_byte",
    "wake_seconds": "start_delay_seconds",
}


@dataclasses.dataclass(frozen=True)
class LinkRate:
    """The cost of one kind of collective: ``latency_seconds + wire_bytes * seconds_per_byte``.

    ``wire_bytes`` are the bytes that one rank sends in a ring: ``(N-1)/N`` of the whole tensor for
    an all-gather, a reduce-scatter or an all-to-all, twice that for an all-reduce.

    Attributes:
        latency_seconds: time of a collective of no bytes.
        seconds_per_byte: time of each wire byte.
        overhead_seconds_per_byte: compute overhead for each wire byte: concurrent kernels take
            longer. A CPU's core copies and checksums gloo's data; NCCL occupies some SMs of a GPU.
        start_seconds: compute overhead of each collective, at any size: its launch, and its
            threads, which take the core from the kernels.
        start_delay_seconds: start delay of a collective that starts beside computing while the
            network is idle (``passes/simulate/network.py``).
        carried_out: the algorithm, for people: ``ring``, ``messages``, ``all_reduce inside``; "":
            unknown.
    """

    latency_seconds: Seconds
    seconds_per_byte: Seconds
    overhead_seconds_per_byte: Seconds = 0.0
    start_seconds: Seconds = 0.0
    start_delay_seconds: Seconds = 0.0
    carried_out: str = ""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LinkRate:
        """Raises ValueError if a field is missing, unknown or of a wrong kind.

        Profiles of version 0.1 have other names for two fields.
        """
        if isinstance(data, dict):
            data = {_RENAMED.get(name, name): value for name, value in data.items()}
        return decoded(cls, data)

    def with_bandwidth(self, times: float, busy: bool = False) -> LinkRate:
        """The same link with ``times`` its bytes per second; the latency stays.

        ``busy``: the compute overhead per byte scales with the time per byte, as for a collective
        that holds its share of a GPU while in flight. Otherwise it stays, as for copies on a core.
        """
        return dataclasses.replace(
            self,
            seconds_per_byte=self.seconds_per_byte / times,
            overhead_seconds_per_byte=self.overhead_seconds_per_byte / (times if busy else 1.0),
        )


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The network between the host of a profile and other hosts like it.

    Attributes:
        ranks: ranks of one host; the profile's ``collectives`` hold for at most these.
        between: rates of a group with one rank on each host, while the groups of the other ranks
            communicate too.
        hop_seconds: latency that a ring adds for every rank within a host.
        host_hop_seconds: latency that a ring adds for every host.
    """

    ranks: Annotated[int, Meta(ge=1)]
    between: dict[str, LinkRate]
    hop_seconds: Seconds = 0.0
    host_hop_seconds: Seconds = 0.0

    @classmethod
    def from_dict(cls, data: Any) -> Hosts:
        """Raises ValueError if a field is missing, unknown or of a wrong kind."""
        if isinstance(data, dict) and "between" in data:
            data = {**data, "between": _links(" between hosts", data["between"])}
        return decoded(cls, data)


def wire_bytes(kind: str, full_bytes: int, world_size: int) -> float:
    """Bytes that one rank sends for a collective; ``full_bytes``: size of the whole tensor."""
    share = full_bytes * (world_size - 1) / world_size
    return 2 * share if kind == "all_reduce" else share


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates of one rank's device and of the network between ranks.

    Attributes:
        name: name of the profile.
        flops_per_second: by dtype name (``float32``); ``default`` for all other dtypes.
        memory_bytes_per_second: rate at which kernels read and write memory.
        launch_seconds: time to start a kernel. On a CPU it comes on top of the kernel's time by the
            rates. A GPU's kernel takes at least this time.
        collectives: ``LinkRate`` by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``,
            ``all_to_all``. Over all ranks.
        dimensions: the same by name of a mesh dimension, over the ranks along it (``along``).
        allocator_alignment_bytes: sizes of device tensors are rounded up to a multiple.
        library_bytes: memory of torch's allocator that no tensor of a script has: workspaces that
            libraries keep (cuBLAS), and ``BLOCK_RESTS_BYTES``. On a CPU there is none.
        memory_bytes: size of the device's memory, which CPU ranks of one machine share; 0: unknown.
        device_type: torch's name of the device type, ``cpu`` or ``cuda``.
        compute_capability: of a GPU, as ``9.0``; "": unknown.
        source: origin of the figures, for people; "": unknown.
        update_seconds_per_byte: time of an optimizer's step for each byte of parameter, gradient
            and state (0: ``UPDATE_PASSES / memory_bytes_per_second``).
        update_seconds_per_parameter: additional time for each parameter.
        update_seconds_per_plain_parameter: the same for plain tensors, if no parameter is sharded.
        kernel_seconds: measured times by ``passes.annotate.kernel_key``; the
            rates price all other kernels.
        learned: corrections by training step, from measured steps (``for_step``).
        in_force: the corrections of the step that is planned or lowered. They change every price
            of this profile, and no rate of it.
        hosts: the network beyond one host (``over``); None: the rates hold for any number of
            ranks.
    """

    name: str
    flops_per_second: dict[str, Rate]
    memory_bytes_per_second: Rate
    launch_seconds: Seconds
    collectives: dict[str, LinkRate]
    dimensions: dict[str, dict[str, LinkRate]] = dataclasses.field(default_factory=dict)
    allocator_alignment_bytes: Count = 64
    library_bytes: Count = 0
    memory_bytes: Count = 0
    device_type: str = "cpu"
    compute_capability: Annotated[str, Meta(pattern=r"^(\d+\.\d+)?$")] = ""
    source: str = ""
    update_seconds_per_byte: Seconds = 0.0
    update_seconds_per_parameter: Seconds = 0.0
    update_seconds_per_plain_parameter: Seconds = 0.0
    kernel_seconds: dict[str, Seconds] = dataclasses.field(default_factory=dict)
    learned: dict[str, Learned] = dataclasses.field(default_factory=dict)
    in_force: Learned = dataclasses.field(default_factory=Learned)
    hosts: Hosts | None = None

    def over(self, ranks: Mapping[str, int]) -> Hardware:
        """The profile for these ranks, on the smallest sufficient number of hosts.

        A ring over several hosts uses all network cards of a host at once, as NCCL's channels do.
        Its rate is the lower of ``hosts.ranks`` times the rate between hosts and the rate within
        a host.

        Args:
            ranks: ranks by mesh dimension, one or two dimensions. With two, and the inner one
                within a host, the result has rates along both.
        """
        hosts, world_size = self.hosts, math.prod(ranks.values())
        if hosts is None or world_size <= hosts.ranks:
            return self
        count = -(-world_size // hosts.ranks)
        hops_seconds = hosts.hop_seconds * (world_size - count) + hosts.host_hop_seconds * count
        flat = {}
        for kind, within in self.collectives.items():
            between = hosts.between[kind]
            slower = max(within, between, key=lambda rate: rate.latency_seconds)
            each = max(within.seconds_per_byte, between.seconds_per_byte / hosts.ranks)
            share = within.overhead_seconds_per_byte / (within.seconds_per_byte or math.inf)
            flat[kind] = dataclasses.replace(
                slower,
                latency_seconds=slower.latency_seconds + hops_seconds,
                seconds_per_byte=each,
                overhead_seconds_per_byte=share * each,
            )
        dimensions = dict(self.dimensions)
        names = list(ranks)
        if len(names) == 2 and ranks[names[1]] <= hosts.ranks:
            crossing = hosts.host_hop_seconds * ranks[names[0]]
            dimensions[names[0]] = {
                kind: dataclasses.replace(rate, latency_seconds=rate.latency_seconds + crossing)
                for kind, rate in hosts.between.items()
            }
            dimensions[names[1]] = self.collectives
        return dataclasses.replace(self, collectives=flat, dimensions=dimensions, hosts=None)

    def with_bandwidth(self, times: float, ranks: Mapping[str, int] | None = None) -> Hardware:
        """The same devices on a network with ``times`` the bytes per second.

        Latencies stay. Without ``hosts``, the compute overhead per byte stays. With ``hosts``, it
        remains a share of the time in flight, as in ``over``.

        Args:
            times: above zero; ``math.inf``: bytes take no time.
            ranks: ranks by mesh dimension, as for ``over``. Rates within a host stay:
                ``collectives`` if ``hosts`` is set, and the rates along the inner of two
                dimensions. None: all rates change.
        """
        names = list(ranks or ())
        within = names[1] if len(names) == 2 else None
        hosts = self.hosts
        busy = hosts is not None

        def scaled(kinds: dict[str, LinkRate]) -> dict[str, LinkRate]:
            return {kind: rate.with_bandwidth(times, busy) for kind, rate in kinds.items()}

        if hosts is not None:
            hosts = dataclasses.replace(hosts, between=scaled(hosts.between))
        return dataclasses.replace(
            self,
            collectives=self.collectives if busy and ranks else scaled(self.collectives),
            dimensions={
                name: kinds if name == within else scaled(kinds)
                for name, kinds in self.dimensions.items()
            },
            hosts=hosts,
        )

    def for_step(self, key: str) -> Hardware:
        """The profile with the corrections learned for a training step in force, if any."""
        return dataclasses.replace(self, in_force=self.learned.get(key, Learned()))

    def without_steps(self) -> Hardware:
        """The profile without what it knows of single operators and training steps."""
        return dataclasses.replace(self, kernel_seconds={}, learned={}, in_force=Learned())

    def along(self, dimension: str | None) -> Hardware:
        """The profile for collectives along a mesh dimension; itself without rates along it."""
        if dimension is None or dimension not in self.dimensions:
            return self
        return dataclasses.replace(self, collectives=self.dimensions[dimension])

    def flops(self, dtype: str) -> float:
        """FLOP/s for a dtype name such as ``bfloat16``."""
        return self.flops_per_second.get(dtype, self.flops_per_second["default"])

    def collective_seconds(self, kind: str, full_bytes: int, world_size: int) -> float:
        """Seconds of one collective on a tensor of ``full_bytes`` over ``world_size`` ranks.

        Source: the alpha-beta model, as in OSDP (arXiv 2209.13258), section 3.

        Raises:
            KeyError: if the profile has no rate for this kind.
        """
        if world_size == 1:
            return 0.0
        rate = self.collectives[kind]
        sent_bytes = wire_bytes(kind, full_bytes, world_size)
        seconds = rate.latency_seconds + sent_bytes * rate.seconds_per_byte
        return seconds * self.in_force.network_factor

    def compute_overhead_seconds(self, kind: str, full_bytes: int, world_size: int) -> float:
        """Compute overhead in seconds of a collective on a tensor of ``full_bytes``."""
        if world_size == 1:
            return 0.0
        rate = self.collectives[kind]
        sent_bytes = wire_bytes(kind, full_bytes, world_size)
        seconds = rate.start_seconds + sent_bytes * rate.overhead_seconds_per_byte
        return seconds * self.in_force.overhead_factor

    def start_delay_seconds(self, kind: str, world_size: int) -> float:
        """Start delay in seconds of a collective that starts beside computing."""
        return 0.0 if world_size == 1 else self.collectives[kind].start_delay_seconds

    def update_seconds(self, held_bytes: int, parameters: int, plain: bool = False) -> float:
        """Seconds of an optimizer's step; ``held_bytes``: parameters, gradients and state.

        ``plain``: the parameters are plain tensors, not DTensors.
        """
        each = self.update_seconds_per_byte or UPDATE_PASSES / self.memory_bytes_per_second
        besides = self.update_seconds_per_parameter
        if plain:
            besides = self.update_seconds_per_plain_parameter
        return self.in_force.update_factor * (each * held_bytes + besides * parameters)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Hardware:
        """Raises ValueError that names a missing, unknown or wrong field."""
        try:
            made = decoded(cls, _current(data))
            if "default" not in made.flops_per_second:
                raise ValueError("flops_per_second has no 'default'")
            return made
        except ValueError as error:
            raise ValueError(f"not a hardware profile: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Read a profile written by ``save``; ValueError if the file holds none."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} holds no hardware profile: {error}") from error


def _current(data: Any) -> Any:
    """A profile's fields with the current names; its links are checked one by one."""
    if not isinstance(data, dict):
        return data
    links = {"collectives": _links("", data["collectives"])} if "collectives" in data else {}
    dimensions = data.get("dimensions", {})
    if isinstance(dimensions, dict):
        dimensions = {
            dimension: _links(f" along {dimension!r}", kinds)
            for dimension, kinds in dimensions.items()
        }
    hosts = data.get("hosts")
    if hosts is not None:
        try:
            hosts = dataclasses.asdict(Hosts.from_dict(hosts))
        except ValueError as error:
            raise ValueError(f"hosts: {error}") from error
    return {**data, **links, "dimensions": dimensions, "hosts": hosts}


def _links(where: str, kinds: Any) -> dict[str, dict[str, Any]]:
    """Rates by kind, as fields; ``where``: their place in the profile, for errors."""
    if not isinstance(kinds, dict):
        raise ValueError(f"collectives{where}: {kinds!r} is no table of collectives")
    found = {}
    for kind, rate in kinds.items():
        try:
            found[kind] = dataclasses.asdict(LinkRate.from_dict(rate))
        except ValueError as error:
            raise ValueError(f"collective {kind!r}{where}: {error}") from error
    return found


def generic(name: str = "generic", dimensions: Sequence[str] = ()) -> Hardware:
    """A profile of round numbers for graph-level work without predictions.

    One slow CPU rank on a 10 Gbit/s network, not measured. ``dimensions``: names of the two mesh
    dimensions, outer first, if any; the inner one is ten times as fast.
    """
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    link = LinkRate(latency_seconds=1e-4, seconds_per_byte=8e-10)
    within = LinkRate(latency_seconds=1e-5, seconds_per_byte=8e-11)
    return Hardware(
        name=name,
        flops_per_second={"default": 5e10},
        memory_bytes_per_second=1e10,
        launch_seconds=5e-6,
        collectives=dict.fromkeys(kinds, link),
        dimensions={
            dimension: dict.fromkeys(kinds, rate)
            for dimension, rate in zip(dimensions, (link, within), strict=False)
        },
    )
