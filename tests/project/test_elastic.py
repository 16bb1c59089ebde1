"""Elastic training: a host disappears and comes back, and the losses stay those of one run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, HostsError
from benchmarks.processes import free_port
from tests.chosen import more
from tests.project.test_examples import EXAMPLES, environment, losses, torchrun

STEPS = 240
#: A lost host is noticed after three seconds, and hosts that come are waited for one second.
QUICK = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"

#: Without it, a host that joins later waits for a key that nobody writes (torch 2.13).
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class OneMachine:
    """The places of hosts, as processes of this machine."""

    def __init__(self) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"

    def prefix(self, number: int) -> Sequence[str]:
        """The command that runs another one on a host."""
        return ()

    def address(self, number: int) -> str:
        return "127.0.0.1"

    def settings(self, number: int) -> str:
        """Settings of a host's rendezvous."""
        return QUICK

    def variables(self) -> dict[str, str]:
        return {}

    def lose(self, host: Host) -> None:
        """All of its processes end at once, and tell nobody."""
        host.end()

    def mend(self, number: int) -> None:
        """Put a host back to where another one was lost."""


class Namespaces(OneMachine):
    """The places of hosts, as network namespaces; a host is lost with its cable."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.endpoint = f"{hosts.address(0)}:{hosts.port()}"

    def prefix(self, number: int) -> Sequence[str]:
        return self._hosts.command_prefix(number)

    def address(self, number: int) -> str:
        return self._hosts.address(number)

    def settings(self, number: int) -> str:
        """All have the machine's name, so that torchrun cannot see whose address it is."""
        return f"{QUICK},is_host={number == 0}"

    def variables(self) -> dict[str, str]:
        given = self._hosts.variables(0, 0)
        return {name: given[name] for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")}

    def lose(self, host: Host) -> None:
        self._hosts.unplug(host.number)
        host.end()  # what its kernel says of it reaches nobody

    def mend(self, number: int) -> None:
        self._hosts.plug_in(number)


#: torchrun, which begins once a file is there: its imports take seconds.
AGENT = """
import pathlib, sys, time
from torch.distributed.run import main
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
main(sys.argv[2:])
"""


class Host:
    """torchrun's agent on one host, and its rank. The agent waits until it may :meth:`begin`."""

    def __init__(
        self, name: str, place: OneMachine, number: int, folder: Path, cache: Path, steps: int
    ) -> None:
        self.number, self.log = number, folder / f"{name}.log"
        self._begins = folder / f"{name}.begins"
        command = [*place.prefix(number), sys.executable, "-c", AGENT, str(self._begins)]
        command += ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={place.endpoint}"]
        command += [f"--local-addr={place.address(number)}", "--rdzv-id=elastic"]
        command += [f"--rdzv-conf={place.settings(number)}", "--monitor-interval=0.1"]
        command += [str(EXAMPLES / "elastic.py"), f"--steps={steps}", "--every=3", "--timeout=30"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(folder, cache, **ELASTIC, **place.variables()),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def begin(self) -> Host:
        """Let the agent join the others."""
        self._begins.touch()
        return self

    def end(self) -> None:
        """End its processes at once."""
        agent = self.process.pid
        ranks = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        for process in (agent, *map(int, ranks)):
            os.kill(process, signal.SIGKILL)
        self.process.wait()


#: Connects to an address and port until it can.
WAIT = """
import socket, sys, time
while socket.socket().connect_ex((sys.argv[1], int(sys.argv[2]))):
    time.sleep(0.1)
"""


def accepts(place: OneMachine, seconds: float = 60.0) -> None:
    """Wait until a process listens at the rendezvous."""
    command = [*place.prefix(0), sys.executable, "-c", WAIT, *place.endpoint.split(":")]
    subprocess.run(command, check=True, timeout=seconds)


def printed(*hosts: Host) -> str:
    return "\n".join(host.log.read_text() for host in hosts) + "\n"


def until(said: str, *hosts: Host, seconds: float = 180.0) -> str:
    """Wait until one of the hosts has printed a line that matches; what all have printed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        text = printed(*hosts)
        if re.search(said, text, re.MULTILINE):
            return text
        assert any(host.process.poll() is None for host in hosts), text[-6000:]
        time.sleep(0.1)
    raise AssertionError(f"nobody printed {said!r}:\n{printed(*hosts)[-6000:]}")


@pytest.fixture(params=["a cable is cut", *more("processes end")])
def place(request: pytest.FixtureRequest) -> Iterator[OneMachine]:
    """Network namespaces; processes of this machine where there are none."""
    with contextlib.ExitStack() as stack:
        found = OneMachine()
        if request.param == "a cable is cut":
            with contextlib.suppress(HostsError, subprocess.CalledProcessError):
                found = Namespaces(stack.enter_context(Hosts(2, "400mbit")))
        yield found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, inductor_cache: Path) -> dict[int, float]:
    """The losses of one run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    asked = [f"--steps={STEPS}", f"--every={STEPS}"]
    found = losses(torchrun(folder, inductor_cache, 2, "elastic.py", *asked))
    assert sorted(found) == [*range(1, STEPS + 1)]
    return found


def goes_on(place: OneMachine, folder: Path, cache: Path, whole: dict[int, float]) -> None:
    """Two hosts, then one, then two; the losses of each step are those of one run."""
    first = Host("first", place, 0, folder, cache, STEPS).begin()
    hosts = [first]
    try:
        accepts(place)  # on one machine, the agent that comes first holds the rendezvous
        hosts.append(Host("second", place, 1, folder, cache, STEPS).begin())
        until(r"^step [1-9]\d+ .* ranks 2$", *hosts)
        hosts.append(Host("again", place, 1, folder, cache, STEPS))
        place.lose(hosts[1])
        until("^1 ranks go on after step [1-9]", first)
        place.mend(1)
        hosts[2].begin()
        until(rf"^step {STEPS} .* ranks 2$", *hosts)
        assert first.process.wait(60) == 0 and hosts[2].process.wait(60) == 0
    finally:
        for host in hosts:
            if host.process.poll() is None:
                host.end()
    seen = losses(printed(*hosts))
    assert sorted(seen) == sorted(whole)
    assert all(abs(seen[step] - whole[step]) < 1e-3 for step in whole)


@pytest.mark.thorough
def test_a_host_that_disappears_comes_back(
    tmp_path: Path, inductor_cache: Path, whole: dict[int, float], place: OneMachine
) -> None:
    goes_on(place, tmp_path, inductor_cache, whole)
