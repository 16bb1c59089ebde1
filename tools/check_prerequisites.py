"""Check prerequisites before an installation. Runs on any Python 3, standard library only."""
# ruff: noqa: UP031, UP036 - old Pythons must be able to print the message.

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig


def missing():
    """Yield one line for each missing prerequisite, with the remedy."""
    if sys.version_info < (3, 10):
        version = sys.version.split()[0]
        yield "Python 3.10 or later is needed, this is %s: make PYTHON=python3.12" % version
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        yield "Python's venv is needed (Debian, Ubuntu: apt install python3-venv)"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        yield "Python's headers are needed, %s is not there (apt install python3-dev)" % header
    named = shlex.split(os.environ.get("CXX", ""))
    if not any(shutil.which(name) for name in named[:1] or ["g++", "clang++", "c++"]):
        looked = named[0] if named else "g++, clang++, c++"
        yield "a C++ compiler is needed, found none of: %s (apt install g++, or set CXX)" % looked


if __name__ == "__main__":
    found = list(missing())
    if found:
        sys.exit("\n".join("error: " + line for line in found))
