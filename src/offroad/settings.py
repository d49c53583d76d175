"""One frozen `Settings`: flags, a TOML file and keyword arguments all end here, and nothing changes it afterwards."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from offroad.errors import SettingsError
from offroad.speculate.config import Speculation, offered
from offroad.text.tools.registry import REASONING_PARSERS, TOOL_PARSERS

DTYPES = ("auto", "float32", "bfloat16", "float16")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e5m2", "fp8_e4m3")


@dataclass(frozen=True)
class Settings:
    """Everything that a user decides. Names as in vLLM where the meaning is the same.

    Memory sizes are bytes; 0 means that the plan chooses. `kernel` forces kernels by op, as `("linear=torch.linear",)`:
    a kernel named here is used or the plan fails. `api_key` is in no `repr`.
    """

    model: str
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    default_chat_template_kwargs: str = ""
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    revision: str | None = None
    offline: bool = False
    device: str = "auto"
    dtype: str = "auto"
    kernel: tuple[str, ...] = ()
    allow_reference: bool = False
    enforce_eager: bool = False
    batch_invariant: bool = False
    threads: int = 0
    tensor_parallel_size: int = 1
    max_model_len: int = 0
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int = 0
    memory_utilization: float = 0.8
    enable_prefix_caching: bool = True
    speculative_config: str = ""
    checkpoint_interval: int = 1024
    checkpoint_memory_bytes: int = 0
    seed: int = 0
    max_waiting: int = 256
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_body_mib: int = 16
    request_timeout: float = 0.0
    drain_seconds: float = 30.0
    restart_engine: bool = False
    record_requests: str | None = None
    record_content: bool = False
    log_level: str = "info"
    log_json: bool = False

    def __post_init__(self) -> None:
        checks: list[tuple[str, bool, str]] = [
            ("dtype", self.dtype in DTYPES, ", ".join(DTYPES)),
            ("kv_cache_dtype", self.kv_cache_dtype in KV_DTYPES, ", ".join(KV_DTYPES)),
            ("tensor_parallel_size", 1 <= self.tensor_parallel_size <= 64, "1 to 64"),
            ("max_model_len", self.max_model_len >= 0, "0 (as large as fits) or a number of tokens"),
            ("max_num_seqs", 1 <= self.max_num_seqs <= 4096, "1 to 4096"),
            ("max_num_batched_tokens", self.max_num_batched_tokens >= 1, "1 or more"),
            ("kv_cache_memory_bytes", self.kv_cache_memory_bytes >= 0, "0 or more bytes"),
            ("memory_utilization", 0.0 < self.memory_utilization <= 1.0, "more than 0, at most 1"),
            ("checkpoint_interval", self.checkpoint_interval >= 0, "0 (off) or a number of tokens"),
            ("checkpoint_memory_bytes", self.checkpoint_memory_bytes >= 0, "0 (the plan chooses) or more bytes"),
            ("threads", self.threads >= 0, "0 (all cores) or more"),
            ("max_waiting", self.max_waiting >= 1, "1 or more"),
            ("port", 0 <= self.port <= 65535, "0 to 65535 (0: any free one)"),
            ("served_model_name", all(self.served_model_name), "names that are not empty"),
            ("allowed_origins", all(_ORIGIN.fullmatch(o) for o in self.allowed_origins), '"*" or scheme://host[:port]'),
            ("ssl_keyfile", self.ssl_certfile is not None or self.ssl_keyfile is None, "only with --ssl-certfile"),
            ("max_body_mib", 1 <= self.max_body_mib <= 1024, "1 to 1024"),
            ("request_timeout", self.request_timeout >= 0, "0 (no limit) or more seconds"),
            ("drain_seconds", self.drain_seconds >= 0, "0 or more seconds"),
            ("record_content", self.record_requests is not None or not self.record_content, "only with a record"),
            ("kernel", all(entry.count("=") == 1 for entry in self.kernel), "op=kernel, e.g. linear=torch.linear"),
            ("log_level", self.log_level in ("debug", "info", "warning", "error"), "debug, info, warning, error"),
        ]
        for name, known in (("reasoning_parser", REASONING_PARSERS), ("tool_call_parser", TOOL_PARSERS)):
            names = ("auto", "none", *known)
            checks.append((name, getattr(self, name) in names, ", ".join(names)))
        self.drafter()
        self.template_defaults()
        for name, ok, accepted in checks:
            if not ok:
                raise SettingsError(f"--{name.replace('_', '-')}", found=getattr(self, name), accepted=accepted)

    @classmethod
    def resolve(cls, flags: dict[str, Any], config: str | Path | None = None) -> Settings:
        """Settings from flags (None: not given) over a TOML file over the defaults. Raises SettingsError."""
        values: dict[str, Any] = {}
        if config is not None:
            try:
                values = tomllib.loads(Path(config).read_text())
            except (OSError, tomllib.TOMLDecodeError) as error:
                raise SettingsError(
                    f"config file {config}", found=str(error), accepted="a readable TOML file"
                ) from error
            known = [field.name for field in dataclasses.fields(cls)]
            if unknown := [name for name in values if name.replace("-", "_") not in known]:
                raise SettingsError(f"config file {config}", found=", ".join(unknown), accepted=", ".join(known))
        values |= {name: value for name, value in flags.items() if value is not None}
        return cls.of(**{name.replace("-", "_"): value for name, value in values.items()})

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Settings from keywords, each checked by name and type. Raises SettingsError."""
        hints = get_type_hints(cls)
        for name, value in values.items():
            if name not in hints:
                raise SettingsError("setting", found=name, accepted=", ".join(hints), next="see `offroad serve --help`")
            values[name] = _typed(name, value, hints[name])
        if "model" not in values:
            raise SettingsError(
                "model",
                found="none",
                accepted="a folder, a GGUF file, a hub name or a demo name",
                next="e.g. `offroad serve smollm2-135m`",
            )
        return cls(**values)

    def drafter(self) -> Speculation | None:
        """What `speculative_config` says. Raises SettingsError."""
        return offered(self.speculative_config)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is served; answers have the first."""
        return self.served_model_name or (self.model,)

    def template_defaults(self) -> dict[str, Any]:
        """Variables of the chat template that a request may override. Raises SettingsError."""
        if not self.default_chat_template_kwargs:
            return {}
        try:
            values = json.loads(self.default_chat_template_kwargs)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise SettingsError(
                "--default-chat-template-kwargs",
                found=self.default_chat_template_kwargs,
                accepted="a JSON object",
                next="""e.g. --default-chat-template-kwargs '{"enable_thinking": false}'""",
            )
        return values

    def replace(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)


def _typed(name: str, value: Any, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    if hint == tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, (list, tuple)) and all(isinstance(entry, str) for entry in values):
            return tuple(values)
        found = "something else" if name == "api_key" else repr(value)
        raise SettingsError(f"setting {name}", found=found, accepted="a string or a list of strings")
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and bool not in kinds:
        raise SettingsError(f"setting {name}", found=repr(value), accepted=str(hint))
    if not isinstance(value, kinds):
        raise SettingsError(f"setting {name}", found=repr(value), accepted=getattr(hint, "__name__", str(hint)))
    return value
