"""Hosts on one machine: network namespaces joined by links of limited rate.

    with Hosts(2, "400mbit") as hosts:
        hosts.run([sys.executable, "train.py"])     # one rank on each host

Needs root and the ``ip`` and ``tc`` commands (iproute2): a namespace for each host, one
more for the switch between them, and nothing in the machine's own namespace. The limit
is on what each host sends (a token bucket), as with a virtual machine's egress limit.

Names carry the process id, so that several runs can stand side by side. Leaving the
``with`` ends the ranks and removes the namespaces, also after an error, Ctrl-C or
SIGTERM; what a killed run left behind is removed by the next one.

As a command: ``python -m benchmarks.hosts --hosts 2 --rate 400mbit -- python train.py``
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.processes import Processes, RanksError

_PREFIX = "osdp-hosts"
_DEVICE = "eth0"
_ADDRESS = "10.77.0.{}"
#: Bytes a host may send at once before the limit holds: about 5 ms at 400 Mbit/s.
_BURST = "256kb"


class HostsError(RanksError):
    """The hosts cannot be made."""


class Hosts(Processes):
    """``count`` hosts. ``rate``: as ``tc`` writes it, ``400mbit`` or ``1gbit``.

    ``ranks_per_host``: they share what their host may send, and reach each other without a limit.

    Raises:
        HostsError: on entering, without root or iproute2, or if the machine allows no namespaces.
    """

    def __init__(self, count: int, rate: str, ranks_per_host: int = 1) -> None:
        super().__init__(count * ranks_per_host)
        self.count = count
        self.ranks_per_host = ranks_per_host
        self.rate = rate
        self._prefix = f"{_PREFIX}-{os.getpid()}"
        self._port = 29500
        self._old_handler: object = None

    @property
    def bytes_per_second(self) -> float:
        """What each host may send.

        Raises:
            HostsError: if the rate is not written like ``400mbit``.
        """
        found = re.fullmatch(r"([0-9.]+)([kmg]?)bit", self.rate)
        if found is None:
            raise HostsError(f"rate {self.rate!r}: write it like 400mbit or 1gbit")
        number, unit = found.groups()
        return float(number) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[unit] / 8

    def __enter__(self) -> Hosts:
        _check_prerequisites()
        _remove_left_behind()
        self._old_handler = signal.signal(signal.SIGTERM, _exit_on_signal)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End the ranks and remove the hosts. May be called twice."""
        self._end_ranks()
        for name in _namespaces():
            if name.startswith(f"{self._prefix}-"):
                subprocess.run(["ip", "netns", "del", name], check=False)
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)  # type: ignore[arg-type]
            self._old_handler = None

    def port(self) -> int:
        """The next port: one just closed may not be bound again at once."""
        self._port += 1
        return self._port

    def command_prefix(self, rank: int) -> Sequence[str]:
        """The command that runs another one on a rank's host."""
        return ["ip", "netns", "exec", self._host(rank // self.ranks_per_host)]

    def variables(self, rank: int, port: int) -> dict[str, str]:
        """The environment variables by which a rank finds the others."""
        return {
            **super().variables(rank, port),
            "LOCAL_RANK": str(rank % self.ranks_per_host),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "MASTER_ADDR": _ADDRESS.format(1),
            # gloo would otherwise look for the interface of the machine's own name.
            "GLOO_SOCKET_IFNAME": _DEVICE,
            "TP_SOCKET_IFNAME": _DEVICE,
        }

    def address(self, number: int) -> str:
        """The address of a host."""
        return _ADDRESS.format(number + 1)

    def unplug(self, number: int) -> None:
        """Cut a host's cable: nothing comes or goes, and nobody is told."""
        _ip(f"-n {self._prefix}-switch link set port{number} down")

    def plug_in(self, number: int) -> None:
        """Mend a host's cable."""
        _ip(f"-n {self._prefix}-switch link set port{number} up")

    def _build(self) -> None:
        switch = f"{self._prefix}-switch"
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for rank in range(self.count):
            host = self._host(rank)
            _ip(f"netns add {host}")
            _ip(f"link add port{rank} netns {switch} type veth peer name {_DEVICE} netns {host}")
            _ip(f"-n {switch} link set port{rank} master bridge up")
            _ip(f"-n {host} address add {_ADDRESS.format(rank + 1)}/24 dev {_DEVICE}")
            _ip(f"-n {host} link set {_DEVICE} up")
            _ip(f"-n {host} link set lo up")
            limit = f"tbf rate {self.rate} burst {_BURST} latency 100ms"
            _command(f"tc -n {host} qdisc add dev {_DEVICE} root {limit}")

    def _host(self, number: int) -> str:
        return f"{self._prefix}-{number}"


def _check_prerequisites() -> None:
    if os.geteuid() != 0:
        raise HostsError(
            "hosts are network namespaces, and only root may make them: run this as root "
            "(in a container: with --cap-add NET_ADMIN,SYS_ADMIN)"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise HostsError(f"the {tool!r} command is missing: install iproute2")


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]


def _remove_left_behind() -> None:
    """Remove the hosts of runs whose process is gone."""
    for name in _namespaces():
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", name)
        if match and not Path("/proc", match[1]).exists():
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(arguments: str) -> None:
    _command(f"ip {arguments}")


def _command(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostsError(f"{line!r}: {done.stderr.strip() or done.returncode}")


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # unwinds the stack, and with it the `with` that made the hosts


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """The arguments of a measurement on hosts: ``--hosts`` and ``--rate``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="400mbit", help="what each host may send")
    return parser


@contextlib.contextmanager
def hosts_and_cache(count: int, rate: str, ranks_per_host: int = 1) -> Iterator[tuple[Hosts, Path]]:
    """Hosts, and an empty folder for caches. A RanksError ends the program with its text."""
    try:
        with (
            Hosts(count, rate, ranks_per_host) as hosts,
            tempfile.TemporaryDirectory(prefix="osdp-bench-cache") as folder,
        ):
            yield hosts, Path(folder)
    except RanksError as error:
        sys.exit(str(error))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and what each rank runs")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no command given")
    with hosts_and_cache(given.hosts, given.rate) as (hosts, _):
        hosts.run(command)


if __name__ == "__main__":
    main()
