"""The C compiler of this machine: which one is used, and its version."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec

from offroad.errors import SettingsError


@dataclass(frozen=True)
class Compiler:
    """A C compiler: the command that runs it, its version line, and where it was found (`$CC`, `PATH`, `ziglang`)."""

    command: tuple[str, ...]
    version: str
    origin: str


def find_compiler() -> Compiler | None:
    """The first that answers `--version` of $CC, cc, gcc, clang and the `ziglang` package; None if there is none.

    A $CC that does not run raises SettingsError: whoever sets it wants that one and no other.
    """
    named = os.environ.get("CC", "").strip()
    if named:
        command = tuple(shlex.split(named))
        version = _version(command)
        if version is None:
            raise SettingsError("environment variable CC", found=named, accepted="a C compiler that answers --version",
                                next="unset CC to let offroad look for cc, gcc, clang or ziglang")
        return Compiler(command, version, "$CC")
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path and (version := _version((path,))):
            return Compiler((path,), version, "PATH")
    if find_spec("ziglang") is not None:
        command = (sys.executable, "-m", "ziglang", "cc")
        if version := _version(command):
            return Compiler(command, version, "ziglang")
    return None


def _version(command: tuple[str, ...]) -> str | None:
    """The first line of `--version`, or None if the command does not run."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
