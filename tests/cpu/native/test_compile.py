"""The compile step: cached, atomic, and clear when there is no compiler or it refuses."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from offroad.native import compile as native_compile
from offroad.native.compile import CompileError, build, find_compiler
from offroad.native.library import library, set_threads


def script(path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(native_compile, "find_compiler", lambda: None)
    with pytest.raises(CompileError, match=r"apt install gcc.*pip install offroad\[cc\]"):
        build()


def test_nothing_is_found_on_an_empty_path(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native_compile.importlib.util, "find_spec", lambda name: None)
    assert find_compiler() is None


def test_named_compiler_is_used_or_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", script(tmp_path / "mycc", "echo mycc 1"))
    assert find_compiler().version == "mycc 1"
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    with pytest.raises(CompileError, match="missing"):
        find_compiler()


def test_refusal_carries_the_compilers_words(monkeypatch, tmp_path):
    monkeypatch.setenv("OFFROAD_HOME", str(tmp_path / "home"))
    text = 'if [ "$1" = --version ]; then echo badcc 1; else echo "no such target" >&2; exit 1; fi'
    monkeypatch.setenv("CC", script(tmp_path / "badcc", text))
    with pytest.raises(CompileError, match="no such target"):
        build()
    assert not list((tmp_path / "home" / "native").glob("*.so"))


def test_compiled_once_and_loadable(monkeypatch, tmp_path):
    monkeypatch.setenv("OFFROAD_HOME", str(tmp_path))
    monkeypatch.setattr(native_compile, "OPTIONS", tuple("-O0" if o == "-O3" else o for o in native_compile.OPTIONS))
    first = build()
    stamp = first.stat().st_mtime_ns
    assert build() == first
    assert first.stat().st_mtime_ns == stamp
    assert ctypes.CDLL(str(first)).offroad_linear
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, "lock"])


def test_child_of_a_fork_can_run_kernels():
    code = """
import os, torch
from offroad.native.library import library, set_threads
from offroad.native.pack import pack
from offroad.ops.cpu_kernels import _bind_linear
from offroad.quant.packed import Packed
set_threads(2)
w = pack(Packed("dense", 256, 64, {"w": torch.ones(256, 64)}))
call, x = _bind_linear(), torch.ones(3, 64)
expected = call(x, w)
pid = os.fork()
if pid == 0:
    same = torch.equal(call(x, w), expected) and set_threads(2) == 2 and torch.equal(call(x, w), expected)
    os._exit(0 if same else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    run = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_thread_number_can_change():
    library()
    assert [set_threads(n) for n in (1, 3, 2)] == [1, 3, 2]
