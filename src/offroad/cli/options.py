"""Flags made from the fields of `Settings`, in one place: name, type, default and help group of every option."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from offroad.settings import DTYPES, KV_DTYPES, Settings
from offroad.text.tools.registry import REASONING_PARSERS, TOOL_PARSERS


@dataclass(frozen=True)
class Flag:
    """Help of one settings field: the group it is listed in, its text, and how its value is called."""

    group: str
    help: str
    metavar: str | None = None


def _names(parsers: Iterable[str]) -> str:
    return "|".join(("auto", "none", *parsers))


# Every field of Settings but `model`, which is the argument of a verb. A test holds the two together.
FLAGS: dict[str, Flag] = {
    "served_model_name": Flag(
        "model", "Name under which the model is served; default: the name given. May be repeated.", "NAME"
    ),
    "chat_template": Flag("model", "File with a Jinja chat template; default: the checkpoint's own.", "FILE"),
    "default_chat_template_kwargs": Flag(
        "serve", "Variables of the chat template for requests that do not set them.", "JSON"
    ),
    "reasoning_parser": Flag(
        "serve", "How thoughts are marked; auto: as the chat template says.", _names(REASONING_PARSERS)
    ),
    "tool_call_parser": Flag(
        "serve", "How calls of tools are written; auto: as the chat template says.", _names(TOOL_PARSERS)
    ),
    "revision": Flag("model", "Branch, tag or commit of the model on the hub.", "REVISION"),
    "offline": Flag("model", "Use what is on disk and open no connection."),
    "dtype": Flag("model", "Type of activations.", "|".join(DTYPES)),
    "max_model_len": Flag(
        "memory", "Longest context in tokens, prompt and answer; 0: the model's, or what fits.", "TOKENS"
    ),
    "kv_cache_dtype": Flag("memory", "Type of the KV cache; auto: as the activations.", "|".join(KV_DTYPES)),
    "kv_cache_memory_bytes": Flag("memory", "Bytes for the KV cache; 0: the plan chooses.", "BYTES"),
    "memory_utilization": Flag("memory", "Part of the device's memory that may be used.", "FRACTION"),
    "enable_prefix_caching": Flag("memory", "Keep the KV cache of finished requests and reuse common prefixes."),
    "checkpoint_interval": Flag("memory", "Tokens between checkpoints of recurrent state; 0: none.", "TOKENS"),
    "checkpoint_memory_bytes": Flag("memory", "Bytes of checkpoints of recurrent state; 0: planned.", "BYTES"),
    "device": Flag(
        "speed",
        "auto, cpu, cuda, or a profile, or a path of one ending in .toml: to plan for, or to run by on a newer GPU.",
        "DEVICE",
    ),
    "kernel": Flag(
        "speed",
        "Force a kernel for an op (linear), a use of it (linear:down), or weights kept so (linear@fp8); repeatable.",
        "OP=NAME",
    ),
    "allow_reference": Flag("speed", "Allow slow reference kernels on a GPU."),
    "enforce_eager": Flag("speed", "Make no CUDA graphs of steps."),
    "batch_invariant": Flag("speed", "Make a request's tokens independent of what runs beside it; slower on GPUs."),
    "threads": Flag("speed", "CPU threads; 0: all cores.", "N"),
    "speculative_config": Flag("speed", 'Drafts, e.g. {"method": "ngram", "num_speculative_tokens": 4}.', "JSON"),
    "tensor_parallel_size": Flag("speed", "GPUs that share each layer; more than one only for `plan` so far.", "N"),
    "max_num_seqs": Flag("speed", "Most sequences that run at once.", "N"),
    "max_num_batched_tokens": Flag("speed", "Most tokens in one step.", "TOKENS"),
    "seed": Flag("speed", "Seed of requests that bring none.", "N"),
    "host": Flag("serve", "Address to listen on.", "HOST"),
    "port": Flag("serve", "Port to listen on; 0: any free one.", "PORT"),
    "max_waiting": Flag("serve", "Most requests that wait; more are answered with 429.", "N"),
    "api_key": Flag("serve", "Key that requests must bring, but to /health; may be repeated.", "KEY"),
    "api_key_file": Flag("serve", "File with such keys, one a line.", "FILE"),
    "allowed_origins": Flag("serve", "Origin whose web pages may call the server, or *; may be repeated.", "ORIGIN"),
    "ssl_certfile": Flag("serve", "Certificate (PEM, with its chain): the server speaks HTTPS.", "FILE"),
    "ssl_keyfile": Flag("serve", "Private key of the certificate; default: in the same file.", "FILE"),
    "max_body_mib": Flag("serve", "Largest body of a request; larger ones are answered with 413.", "MIB"),
    "request_timeout": Flag("serve", "After how long a request is ended with an error; 0: never.", "SECONDS"),
    "drain_seconds": Flag("serve", "After SIGTERM, how long running requests may take to finish.", "SECONDS"),
    "restart_engine": Flag("serve", "Start the engine's process again when it ends, up to 5 times in 10 minutes."),
    "record_requests": Flag("serve", "File to which requests are added, without their texts (JSON lines).", "FILE"),
    "record_content": Flag("serve", "Keep the texts of requests in the record."),
    "log_level": Flag("serve", "How much is logged.", "debug|info|warning|error"),
    "log_json": Flag("serve", "Log one JSON object a line."),
}

ENGINE_GROUPS = ("model", "memory", "speed")
ALL_GROUPS = (*ENGINE_GROUPS, "serve")


def with_settings(*groups: str, file: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a verb the flags of some groups, and `--config` unless `file` is False: then it has no such parameter.

    The verb names two parameters, `flags` and `config`, which are replaced by the options: it receives what the user
    gave as `flags` (fields of `Settings`; what was not given is absent) and the path of the TOML file, or None.
    """

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        names = [name for group in groups for name, flag in FLAGS.items() if flag.group == group]
        hints = get_type_hints(verb, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(verb).parameters.values()]
        kept = [p for p in own if p.name not in ("flags", "config")]
        parameters = [*kept, *(_parameter(name) for name in names), *([_config()] if file else [])]

        def command(**given: Any) -> Any:
            flags = {name: given.pop(name) for name in names}
            return verb(**given, flags={name: value for name, value in flags.items() if value is not None})

        command.__name__, command.__doc__ = verb.__name__, verb.__doc__
        # typer calls by keyword, so options may follow in any order; what it reads is this signature.
        command.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    flag = FLAGS[name]
    field = next(f for f in dataclasses.fields(Settings) if f.name == name)
    hint = get_type_hints(Settings)[name]
    kind = list[str] if hint == tuple[str, ...] else next(k for k in (get_args(hint) or (hint,)) if k is not type(None))
    spelling = "--" + name.replace("_", "-")
    help = flag.help if field.default in (None, ()) or kind is bool else f"{flag.help} (default: {field.default})"
    if kind is bool:
        declarations = [f"{spelling}/--no-{spelling[2:]}"] if field.default else [spelling]
        help += " (default: on)" if field.default else ""
    else:
        declarations = [spelling]
    option = typer.Option(
        *declarations, help=help, metavar=flag.metavar, rich_help_panel=flag.group, show_default=False
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _config() -> inspect.Parameter:
    option = typer.Option(
        "--config",
        help="TOML file with the same names; a flag wins over it.",
        metavar="FILE",
        rich_help_panel="model",
        show_default=False,
    )
    return inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


class GroupedCommand(TyperCommand):
    """A verb whose `--help` lists its options by group, as plain text: quick to make, and no name is ever cut off."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (entry := parameter.get_help_record(ctx)) is not None:
                title = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None)
                groups.setdefault(f"Options: {panel}" if panel else title, []).append(entry)
        order = ["Arguments", "Options", *(f"Options: {name}" for name in ALL_GROUPS)]
        for title in sorted(groups, key=order.index):
            with formatter.section(title):
                formatter.write_dl(groups[title])


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder, a GGUF file, a hub name or a demo name (see `offroad list`).",
        show_default=False,
    ),
]
