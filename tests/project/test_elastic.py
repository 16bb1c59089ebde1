"""Elastic training: a host disappears and comes back, and the losses stay those of one run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.processes import free_port
from tests.project.test_examples import EXAMPLES, environment, losses, torchrun

STEPS = 600
#: A lost host is noticed after three seconds, and hosts that come are waited for one second.
QUICK = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"

#: Without it, a host that joins later waits for a key that nobody writes (torch 2.13).
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Host:
    """torchrun's agent on one host, and its rank."""

    def __init__(self, name: str, port: int, folder: Path, cache: Path, steps: int) -> None:
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2"]
        command += ["--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        command += ["--rdzv-id=elastic", f"--rdzv-conf={QUICK}", "--monitor-interval=0.1"]
        command += [str(EXAMPLES / "elastic.py"), f"--steps={steps}", "--every=2", "--timeout=30"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(folder, cache, **ELASTIC),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def disappear(self) -> None:
        """All of its processes end at once, and tell nobody."""
        agent = self.process.pid
        ranks = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        for process in (agent, *map(int, ranks)):
            os.kill(process, signal.SIGKILL)
        self.process.wait()


def accepts(port: int, seconds: float = 60.0) -> None:
    """Wait until a process listens on a port."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on port {port}")


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


@pytest.mark.thorough
def test_a_host_that_disappears_and_comes_back(tmp_path: Path, inductor_cache: Path) -> None:
    asked = [f"--steps={STEPS}", "--every=100", "--folder=whole"]
    whole = losses(torchrun(tmp_path, inductor_cache, 2, "elastic.py", *asked))
    assert sorted(whole) == [*range(1, STEPS + 1)]

    port = free_port()
    first = Host("first", port, tmp_path, inductor_cache, STEPS)
    hosts = [first]
    try:
        accepts(port)  # on one machine, the agent that comes first holds the rendezvous
        hosts.append(Host("second", port, tmp_path, inductor_cache, STEPS))
        until(r"^step [1-9]\d+ .* ranks 2$", *hosts)
        hosts[1].disappear()
        until("^1 ranks go on after step [1-9]", first)
        hosts.append(Host("again", port, tmp_path, inductor_cache, STEPS))
        until(rf"^step {STEPS} .* ranks 2$", *hosts)
        assert first.process.wait(60) == 0 and hosts[2].process.wait(60) == 0
    finally:
        for host in hosts:
            if host.process.poll() is None:
                host.disappear()
    seen = losses(printed(*hosts))
    assert sorted(seen) == sorted(whole)
    assert all(abs(seen[step] - whole[step]) < 1e-3 for step in whole)
