"""Finds a C compiler and compiles the kernels for this machine, once: the library is cached by what it is made from."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from offroad.errors import PlanError

FOLDER = Path(__file__).parent
OPTIONS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-Wno-psabi", "-Wno-unknown-pragmas")
INSTALL = "install one: `apt install gcc`, or `pip install offroad[cc]`"


class CompileError(PlanError):
    """No C compiler, or it refused the kernels; the text holds what it said."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler that runs here: `command` to call it, the option that selects this machine, its first version line."""

    command: tuple[str, ...]
    target: str
    version: str


def find_compiler() -> Compiler | None:
    """$CC, else cc, gcc, clang, else zig from the `ziglang` package; None if none of them runs.

    Raises CompileError if $CC is set and does not run: what a user names is used or refused.
    """
    named = os.environ.get("CC")
    if named:
        if (compiler := _probe(tuple(shlex.split(named)))) is None:
            raise CompileError("C compiler in $CC does not run", found=named, accepted="a C compiler", next="unset CC, or correct it")
        return compiler
    for name in ("cc", "gcc", "clang"):
        if (path := shutil.which(name)) and (compiler := _probe((path,))):
            return compiler
    if importlib.util.find_spec("ziglang") is not None:
        return _probe((sys.executable, "-m", "ziglang", "cc"))
    return None


def _probe(command: tuple[str, ...]) -> Compiler | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        run = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if run.returncode:
        return None
    zig = any("zig" in Path(part).name for part in command)
    return Compiler(command, "-mcpu=native" if zig or _arm() else "-march=native", (run.stdout.splitlines() or [""])[0])


def _arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def cpu_flags() -> str:
    """What the instructions that `native` stands for depend on: the CPU's flags, or its name where there are none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def cache_folder() -> Path:
    """Where compiled kernels are kept: $OFFROAD_HOME/native, or ~/.cache/offroad/native."""
    home = os.environ.get("OFFROAD_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "offroad") / "native"


def build(compiler: Compiler | None = None) -> Path:
    """The path of the compiled library; compiles it (a few seconds) if the cache has none. Raises CompileError."""
    compiler = compiler or find_compiler()
    if compiler is None:
        raise CompileError("no C compiler for the CPU kernels", found="none of $CC, cc, gcc, clang, ziglang", accepted="any", next=INSTALL)
    sources = sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])
    digest = hashlib.blake2b(digest_size=16)
    for part in (*OPTIONS, *compiler.command, compiler.target, compiler.version, cpu_flags()):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"kernels-{digest.hexdigest()}.so"
    if not library.exists():
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(compiler, [source for source in sources if source.suffix == ".c"], library)
    return library


def _compile(compiler: Compiler, sources: list[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        objects = [Path(work) / f"{source.stem}.o" for source in sources]

        def one(pair: tuple[Path, Path]) -> None:
            _run([*compiler.command, *OPTIONS, compiler.target, "-c", str(pair[0]), "-o", str(pair[1])])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(one, sorted(zip(sources, objects, strict=True), key=lambda pair: -pair[0].stat().st_size)))
        linked = Path(work) / "kernels.so"
        _run([*compiler.command, "-shared", *map(str, objects), "-o", str(linked), "-lpthread", "-lm"])
        os.replace(linked, library)


def _run(command: list[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError("the C compiler did not finish", found=str(error), next=f"try another compiler with $CC, or {INSTALL}") from error
    if run.returncode:
        raise CompileError(
            "the C compiler refused the CPU kernels", found=f"exit {run.returncode} of {shlex.join(command)}:\n{run.stderr.strip()[-4000:]}",
            accepted="gcc 9, clang 9, zig 0.13 or newer", next="try another compiler with $CC",
        )
