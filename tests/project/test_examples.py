"""The examples run as their docstrings say."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.processes import free_port
from tests.chosen import more

EXAMPLES = Path(__file__).parents[2] / "examples"


#: How often training is killed; more by hand.
KILLS = int(os.environ.get("OSDP_TEST_KILLS", "1"))


def environment(folder: Path, cache: Path, **more: str) -> dict[str, str]:
    """Of an example's processes; what is measured is kept in their folder."""
    given = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(EXAMPLES.parent), given))),
        "OSDP_CACHE_DIR": str(folder / "profiles"),
        **more,
    }


def torchrun(folder: Path, cache: Path, ranks: int, script: str, *arguments: str) -> str:
    """What ranks of an example print, run in a folder of their own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(EXAMPLES / script), *arguments]
    given = environment(folder, cache)
    done = subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.thorough
def test_a_pass_of_your_own(tmp_path, inductor_cache):
    lines = (EXAMPLES / "custom_pass.py").read_text().splitlines()
    assert len(lines) < 40
    printed = torchrun(tmp_path, inductor_cache, 2, "custom_pass.py")
    norms = {line.split(": ")[1] for line in printed.splitlines() if line.startswith("rank ")}
    assert len(norms) == 1, "ranks disagree"
    files = sorted((tmp_path / "graphs").iterdir())
    texts = {path.stem.split("-", 1)[1]: path.read_text() for path in files}
    names = list(texts)
    assert names.index("backward-half_gradients") == names.index("backward-shard") - 1
    sent = [line for line in texts["backward-reorder"].splitlines() if "# reduce" in line]
    assert sent and all(": bf16[" in line for line in sent)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, *more(1)])
def test_training_a_gpt(tmp_path, inductor_cache, ranks):
    small = ["--layers", "1", "--width", "64", "--steps", "3"]
    small += ["--sample", "20" if ranks > 1 else "0"]
    small += ["--html", "out/report.html"]
    limit = ["--memory-limit", "8MiB", "--save-plan", "plan.json"] if ranks > 1 else []
    printed = torchrun(tmp_path, inductor_cache, ranks, "train_gpt.py", *small, *limit)
    assert "held-out loss" in printed and "measured" in printed
    assert "Warning" not in printed and "[rank1]" not in printed
    assert ("a sample" in printed) == (ranks > 1)
    assert ("predicted" in printed) == (ranks > 1)
    assert (tmp_path / "plan.json").exists() == (ranks > 1)
    assert (tmp_path / "out/report.html").exists() == (ranks > 1)
    assert ("open out/report.html" in printed) == (ranks > 1)


@pytest.mark.thorough
def test_torchtitans_llama_trains_as_with_its_fsdp(tmp_path, inductor_cache):
    pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    asked = ["train_torchtitan_llama.py", "--layers", "2", "--steps", "4", "--length", "32"]
    theirs = losses(torchtitan := torchrun(tmp_path, inductor_cache, 2, *asked, "--fsdp"))
    assert "[osdp]" not in torchtitan and len(set(theirs.values())) == 4
    printed = torchrun(tmp_path, inductor_cache, 2, *asked, "--memory-limit", "36MiB")
    assert "shard, " in printed
    assert losses(printed) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.thorough
def test_rays_workers_train_as_torchruns_ranks_and_go_on_in_another_number(
    tmp_path, inductor_cache
):
    pytest.importorskip("ray.train.torch", exc_type=ImportError)
    asked = ["elastic.py", "--steps", "8", "--every", "4", "--folder", "torchrun"]
    whole = losses(torchrun(tmp_path, inductor_cache, 2, *asked))
    for workers, steps in ((2, 4), (1, 8)):
        asked = [f"--workers={workers}", f"--steps={steps}", "--every=4", "--folder=ray"]
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "train_with_ray.py"), *asked],
            cwd=tmp_path,
            env=environment(tmp_path, inductor_cache, RAY_worker_niceness="0"),
            capture_output=True,
            text=True,
            timeout=550,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        printed = re.findall(rf"step {steps}  loss (\S+)  ranks {workers}", done.stdout)
        assert [float(one) for one in printed] == pytest.approx([whole[steps]], abs=2e-6)


class Ranks:
    """Two ranks of an example that may be killed; what rank 0 prints is ``printed``."""

    def __init__(self, folder: Path, cache: Path, script: str, *arguments: str) -> None:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(EXAMPLES / script), *arguments],
                cwd=folder,
                env=environment(folder, cache, RANK=str(rank), **address),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        self.printed = self._ranks[0].stdout

    def finish(self) -> str:
        """Wait until both have ended; returns what rank 0 printed."""
        printed = self._ranks[0].communicate(timeout=550)[0]
        assert [rank.wait(60) for rank in self._ranks] == [0, 0]
        return printed

    def kill(self) -> str:
        """Both, at once; returns what was printed and not read yet."""
        for rank in self._ranks:
            rank.kill()
        return self._ranks[0].communicate()[0] + self._ranks[1].communicate()[0]


def losses(printed: str) -> dict[int, float]:
    """What was printed of each step; the last line may have been cut off."""
    lines = printed[: printed.rfind("\n") + 1].splitlines()
    words = [line.split() for line in lines if line.startswith("step ")]
    return {int(one[1]): float(one[3]) for one in words}


@pytest.mark.thorough
def test_training_that_is_killed_goes_on(tmp_path, inductor_cache):
    """At random moments, also while it saves: nothing is lost but steps after a checkpoint."""
    steps = 8 * (KILLS + 1)
    asked = ["resume.py", "--steps", str(steps), "--every", "3"]
    whole = losses(torchrun(tmp_path, inductor_cache, 2, *asked, "--folder", "whole"))
    assert sorted(whole) == [*range(1, steps + 1)]
    draw, seen, killed = random.Random(0), {}, []
    for _ in range(KILLS):
        run = Ranks(tmp_path, inductor_cache, *asked)
        until, own = draw.randrange(1, 9), ""
        for line in run.printed:
            own += line
            until -= line.startswith("step ")
            if not until:
                break
        time.sleep(draw.random() / 10)
        seen.update(losses(own + run.kill()))
        killed.append(max(seen))
    seen.update(losses(Ranks(tmp_path, inductor_cache, *asked).finish()))
    assert max(killed) < steps and sorted(seen) == sorted(whole)
    assert all(abs(seen[step] - whole[step]) <= 1e-6 for step in whole)
