"""Make an environment with a torch in it. Runs on any Python 3.10, standard library only.

    python3 tools/environment.py .venv                         # keep a torch that is there
    python3 tools/environment.py .venv --torch torch==2.13.0   # install this one

Without ``--torch``, an environment keeps its torch. An environment without torch uses the torch of
the Python that runs this script: the packages of that Python come after its own on the path. If
that Python has no torch, the script installs the newest tested version.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_VERSION = "from importlib.metadata import version; print(version('torch'))"


def tested() -> tuple[str, ...]:
    """The tested versions of torch, read from the source: an import of the package needs torch."""
    source = (ROOT / "osdp_compile" / "torch_versions.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TESTED":
            versions: tuple[str, ...] = ast.literal_eval(node.value)
            return versions
    raise LookupError("torch_versions.py has no TESTED")


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def torch_in(folder: Path) -> str | None:
    """The version of torch that an environment imports; None: it finds none."""
    done = subprocess.run([python_of(folder), "-c", _VERSION], capture_output=True, text=True)
    return done.stdout.strip() or None


def own_torch() -> str | None:
    """The version of torch of the Python that runs this script; None: it has no torch."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def make(folder: Path, requirement: str | None) -> str:
    """Make the environment if it does not exist, and give it a torch; which one, as text."""
    if not python_of(folder).exists():
        venv.create(folder, with_pip=True, symlinks=True)
    if requirement is None:
        here = torch_in(folder)
        if here is not None:
            return f"keeps torch {here}, which is in {folder}"
        own = own_torch()
        if own is not None:
            _follow(folder)
            return f"uses torch {own} of {sys.prefix}"
        requirement = f"torch=={tested()[-1]}"
    print(f"installing {requirement} into {folder}, once", flush=True)
    pip(folder, requirement)
    return f"has torch {torch_in(folder)}"


def pip(folder: Path, *what: str) -> None:
    command = [python_of(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *what], check=True, cwd=ROOT)


def _follow(folder: Path) -> None:
    """Add the packages of this Python to an environment's path, after its own.

    Python reads no ``.pth`` file of an added folder. The path of this Python has the folders that
    it follows itself.
    """
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    done = subprocess.run(
        [python_of(folder), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    (Path(done.stdout.strip()) / "outer.pth").write_text("\n".join(paths) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", help="a requirement such as torch==2.13.0")
    given = parser.parse_args()
    print(make(given.folder, given.torch or None))


if __name__ == "__main__":
    main()
