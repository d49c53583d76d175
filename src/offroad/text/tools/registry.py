"""Parsers by the names that `--tool-call-parser` and `--reasoning-parser` take, and which a chat template asks for."""

from __future__ import annotations

from offroad.text.reasoning import CHANNEL, DSML_THINK, THINK, Thoughts
from offroad.text.said import ToolParser
from offroad.text.tools.blocks import HermesParser
from offroad.text.tools.dsml import DsmlParser
from offroad.text.tools.gemma4 import Gemma4Parser
from offroad.text.tools.qwen_xml import QwenXmlParser
from offroad.text.tools.schema import Tools
from offroad.text.tools.whole import JsonListParser, LlamaJsonParser, PythonicParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "qwen3_xml": QwenXmlParser,
    "hermes": HermesParser,
    "gemma4": Gemma4Parser,
    "llama3_json": LlamaJsonParser,
    "pythonic": PythonicParser,
    "deepseek_v4": DsmlParser,
    "json": JsonListParser,
}
REASONING_PARSERS: dict[str, Thoughts] = {
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "deepseek_v4": DSML_THINK,
    "gemma4": CHANNEL,
}
# What a template that teaches a notation contains, the surest signs first.
_TOOL_SIGNS = (
    ("<｜DSML｜", "deepseek_v4"),
    ("<function=", "qwen3_xml"),
    ("<|tool_call>", "gemma4"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
)
_REASONING_SIGNS = (("<｜DSML｜", "deepseek_v4"), ("<|channel>", "gemma4"), ("</think>", "qwen3"))


def tool_parser_of(template: str) -> str | None:
    """The notation that a chat template teaches; None: none that is known."""
    return next((name for sign, name in _TOOL_SIGNS if sign in template), None)


def reasoning_parser_of(template: str) -> str | None:
    """How the model of a chat template marks its thoughts; None: it has none."""
    return next((name for sign, name in _REASONING_SIGNS if sign in template), None)


def make_tool_parser(name: str, tools: list[dict]) -> ToolParser:
    """A parser of one answer."""
    return TOOL_PARSERS[name](Tools(tools))
