"""From a name to a source: what is tried, and what a failure says."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import write_gguf
from huggingface_hub import constants, errors
from tiny_models import write_tiny

from offroad.errors import ModelNotFound
from offroad.settings import Settings
from offroad.weights import hub, store
from offroad.weights.gguf_source import GgufSource
from offroad.weights.locate import open_source
from offroad.weights.safetensors_source import SafetensorsSource


@pytest.fixture
def fake_hub(monkeypatch):
    """Replaces the two calls that reach the network; returns what was asked."""
    asked: list[tuple] = []

    def install(files: list[str], folder: Path | Exception):
        def listing(self, repo, revision=None, timeout=None):
            asked.append(("list", repo, revision))
            return type("Info", (), {"siblings": [type("S", (), {"rfilename": name})() for name in files]})()

        def snapshot(repo, *, revision, allow_patterns, local_files_only, tqdm_class):
            asked.append(("snapshot", repo, revision, tuple(allow_patterns), local_files_only))
            if isinstance(folder, Exception):
                raise folder
            bar = tqdm_class(total=100, unit="B")
            bar.update(40)
            bar.close()
            return str(folder)

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", listing)
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        return asked

    return install


def test_local_paths(tmp_path):
    write_tiny("llama", tmp_path / "folder")
    write_gguf(tmp_path / "model.gguf")
    assert isinstance(open_source(Settings(model=str(tmp_path / "folder"))), SafetensorsSource)
    assert isinstance(open_source(Settings(model=str(tmp_path / "model.gguf"))), GgufSource)
    assert isinstance(open_source(Settings(model=str(tmp_path), offline=True)), GgufSource)
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(ModelNotFound, match="2 .gguf files.*model.gguf, other.gguf"):
        open_source(Settings(model=str(tmp_path)))
    with pytest.raises(ModelNotFound, match="give the folder"):
        open_source(Settings(model=str(tmp_path / "folder/model.safetensors")))


def test_a_name_that_is_nothing_lists_what_was_tried():
    with pytest.raises(ModelNotFound) as caught:
        open_source(Settings(model="nothing"))
    text = str(caught.value)
    assert all(
        part in text
        for part in ("demo name", "no such file or folder", "hub name", "smollm2-135m", "gemma3-270m", "offroad serve")
    )


@pytest.mark.parametrize("name", ["./org/model", "/org/model", "~/model", "model.gguf", "a/b/c"])
def test_what_looks_like_a_path_never_asks_the_hub(name, fake_hub):
    asked = fake_hub([], RuntimeError("asked"))
    with pytest.raises(ModelNotFound):
        open_source(Settings(model=name))
    assert asked == []


def test_hub_safetensors(tmp_path, fake_hub):
    write_tiny("llama", tmp_path)
    asked = fake_hub(["model.safetensors", "model.gguf"], tmp_path)
    notes: list[float] = []
    source = open_source(Settings(model="org/name", revision="v1"), lambda fraction, note: notes.append(fraction))
    assert isinstance(source, SafetensorsSource)
    kind, repo, revision, patterns, local = asked[1]
    assert (kind, repo, revision, local) == ("snapshot", "org/name", "v1", False)
    assert {"*.safetensors", "config.json", "*.jinja"} <= set(patterns)
    assert {"hf_quant_config.json", "quantize_config.json", "quant_config.json"} <= set(patterns)
    assert not any("gguf" in pattern or "bin" in pattern for pattern in patterns)
    assert 0.4 in notes


def test_hub_gguf(tmp_path, fake_hub):
    write_gguf(tmp_path / "b.gguf")
    asked = fake_hub(["README.md", "a.gguf", "b.gguf"], tmp_path)
    with pytest.raises(ModelNotFound, match="several GGUF files.*org/name:a.gguf, org/name:b.gguf"):
        open_source(Settings(model="org/name"))
    assert isinstance(open_source(Settings(model="org/name:b.gguf")), GgufSource)
    assert asked[-1][3] == ("b.gguf",)
    fake_hub(["b.gguf"], tmp_path)
    assert isinstance(open_source(Settings(model="org/name")), GgufSource)
    fake_hub(["pytorch_model.bin"], tmp_path)
    with pytest.raises(ModelNotFound, match="neither safetensors nor GGUF"):
        open_source(Settings(model="org/name"))


def test_offline_uses_the_cache_only(tmp_path, fake_hub):
    write_tiny("llama", tmp_path)
    asked = fake_hub([], tmp_path)
    open_source(Settings(model="org/name", offline=True))
    assert [(entry[0], entry[-1]) for entry in asked] == [("snapshot", True)]


def test_offline_demo_models(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFROAD_HOME", str(tmp_path))
    monkeypatch.setattr(store, "pull", lambda *args: pytest.fail("pulled while offline"))
    with pytest.raises(ModelNotFound, match="offline.*offroad pull gemma3-270m"):
        open_source(Settings(model="gemma3-270m", offline=True))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("x"), "not in the local Hugging Face cache.*smollm2-135m"),
        (ConnectionError("no route"), "ConnectionError: no route.*smollm2-135m"),
    ],
)
def test_what_the_hub_answers_is_told(error, message, fake_hub):
    fake_hub(["model.safetensors"], error)
    with pytest.raises(ModelNotFound, match=message):
        open_source(Settings(model="org/name"))


def test_our_own_mistakes_are_not_taken_for_the_hub_s(fake_hub):
    fake_hub(["model.safetensors"], ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        open_source(Settings(model="org/name"))


def test_models_of_the_hugging_face_cache_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--some--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(bytes(10))
    assert hub.cached_models() == [("org/some--name", snapshot, 10, "safetensors", True)]
