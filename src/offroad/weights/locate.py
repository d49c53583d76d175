"""From the name that a user gives to an open checkpoint: a demo name, a folder, a GGUF file or a hub name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from offroad.errors import ModelNotFound
from offroad.settings import Settings
from offroad.weights import hub, store
from offroad.weights.source import Source

Progress = Callable[[float, str], None]


def open_source(settings: Settings, progress: Progress | None = None) -> Source:
    """The checkpoint that `settings.model` names, its headers read and no weight.

    Tried in order: a demo name, a local path, a hub name. `settings.offline` uses what is on disk and asks no network.
    Raises ModelNotFound with what was tried, ModelError for a damaged checkpoint.
    """
    return open_path(locate(settings, progress or (lambda fraction, note: None)))


def locate(settings: Settings, progress: Progress) -> Path:
    """The local path of the model, fetched if need be."""
    name = settings.model
    if name in store.DEMO_MODELS:
        return _demo(name, settings.offline, progress)
    path = Path(name).expanduser()
    if path.exists():
        return path
    looks_local = name.startswith((".", "/", "~")) or (
        name.endswith((".gguf", ".safetensors")) and not hub.is_hub_name(name)
    )
    if not looks_local and hub.is_hub_name(name):
        return hub.fetch(name, settings.revision, settings.offline, progress)
    tried = [f"demo name (no: {', '.join(store.DEMO_MODELS)})", f"path (no such file or folder: {path})"]
    if not looks_local:
        tried.append("hub name (not of the form org/model)")
    demos = ", ".join(store.DEMO_MODELS)
    raise ModelNotFound(
        f"model {name}",
        found="; ".join(tried),
        accepted=f"a demo name ({demos}), a folder with config.json and safetensors, a .gguf file, or org/model",
        next=f"e.g. `offroad serve {next(iter(store.DEMO_MODELS))}`",
    )


def _demo(name: str, offline: bool, progress: Progress) -> Path:
    if not offline:
        return store.pull(name, progress)
    path = store.local_path(name)
    if path is None:
        raise ModelNotFound(
            f"demo model {name}, offline",
            found=f"not in {store.models_folder()}, or damaged",
            accepted="a model that was pulled before",
            next=f"`offroad pull {name}` with a network",
        )
    return path


def open_path(path: Path) -> Source:
    """A source over a folder, a GGUF file, or a config.json alone. Raises ModelNotFound for anything else."""
    from offroad.weights.config_source import ConfigSource
    from offroad.weights.gguf_source import GgufSource
    from offroad.weights.safetensors_source import SafetensorsSource

    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(path)
    if path.is_file() and path.suffix == ".json":
        return ConfigSource(path)
    if path.is_file():
        raise ModelNotFound(
            f"model file {path}",
            found=f"a {path.suffix or 'nameless'} file",
            accepted="a .gguf file, or a folder",
            next="for safetensors give the folder, which has config.json too",
        )
    if (path / "config.json").is_file():
        return SafetensorsSource(path)
    gguf = sorted(path.glob("*.gguf"))
    if len(gguf) == 1:
        return GgufSource(gguf[0])
    found = f"{len(gguf)} .gguf files and no config.json" if gguf else "no config.json"
    raise ModelNotFound(
        f"model folder {path}",
        found=found,
        accepted="a folder with config.json and safetensors, or a .gguf file",
        next=f"give one of them: {', '.join(file.name for file in gguf[:5])}" if gguf else "check the path",
    )
