"""The Jinja environment of chat templates: the one that `transformers` gives them, so a template that works there works
here. A template is code from a stranger: the environment is a sandbox, and refuses what would fill the memory."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

MAX_CHARS = 16 * 2**20


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant tokens for training; here its body is rendered, in a
    scope of its own as there."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class TooSlow(Exception):
    """The template has run past the end that `time_limit` has set."""


_end: ContextVar[float] = ContextVar("end", default=float("inf"))


@contextmanager
def time_limit(end: float) -> Iterator[None]:
    """Templates that run within, in this thread, raise TooSlow once `time.monotonic()` is past `end`."""
    token = _end.set(end)
    try:
        yield
    finally:
        _end.reset(token)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose loops and macros look at the clock: without them a template ends soon, since it has an end."""

    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, source, name, filename):
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            look = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("look_at_the_clock"), [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(look).set_lineno(node.lineno))
        return tree

    def look_at_the_clock(self):
        if time.monotonic() > _end.get():
            raise TooSlow

    def call_binop(self, context, operator, left, right):
        sized = [x for x in (left, right) if isinstance(x, (str, list, tuple))]
        count = [x for x in (left, right) if isinstance(x, int)]
        if sized and count and len(sized[0]) * count[0] > MAX_CHARS:
            raise jinja2.exceptions.SecurityError("the template repeats a value too often")
        if operator == "**" and isinstance(right, int) and right > 1024:
            raise jinja2.exceptions.SecurityError("the template raises to too high a power")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's answers reads of any name that was stored in it, and so can pose as another kind of object."""

    def __init__(*args, **kwargs):  # no named `self`: a template may store that name
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_stored(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _check_stored(name)
        super().__setitem__(name, value)


def _check_stored(name) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


class _Dict:
    """`dict(...)` without the type's own methods, which would change messages (`dict.pop(message, "role")`)."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes HTML characters, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format):
    return datetime.datetime.now().strftime(format)


def template_environment() -> jinja2.Environment:
    """A new environment; `from_string` of it compiles a template."""
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    env.globals["dict"] = _Dict()
    env.globals["namespace"] = _Namespace
    return env
