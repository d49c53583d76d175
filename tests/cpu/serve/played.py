"""A server for clients of all kinds: what its model says depends on what it is told, so that a talk can go on.

Asked for the weather, it thinks and calls a tool, twice if "and" is said; told the results, it answers with them. Asked
for JSON, it gives some.
"""

from __future__ import annotations

import re

from fake_engine import EOS, Scripted
from serve_stack import Stack, Wire

from offroad.errors import QueueFull
from offroad.text.answer import Notation
from offroad.text.reasoning import THINK

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
READS = frozenset({"tools", "enable_thinking", "reasoning_effort"})
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"


class Played(Scripted):
    """`busy`: so many requests are refused first."""

    busy = 0

    def submit(self, request) -> None:
        if self.busy:
            self.busy -= 1
            raise QueueFull("waiting requests", found=1, accepted="0")
        super().submit(request)
        prompt = bytes(id for id in request.prompt_ids if id < EOS).decode()
        guide = request.guide
        for i in range(request.params.n):
            self.running[request.id, i][1] = [*answer(prompt, guide is not None and guide.grammar).encode(), EOS]


def answer(prompt: str, grammar) -> str:
    """What the model says; behind open thoughts it ends them first."""
    prompt, opened, _ = prompt.partition("<think>\n")
    thoughts = "Let me think.\n</think>\n\n" if opened else ""
    results = re.findall(r"(\w+): (-?\d+) degrees", prompt)
    if results:
        return thoughts + "It is " + " and ".join(f"{number} in {city}" for city, number in results) + "."
    cities = re.findall(r"[Ww]eather in (\w+)(?: and (\w+))?", prompt)
    if cities and grammar:
        return thoughts + f'{{"city": "{cities[-1][0]}"}}'
    if cities:
        return thoughts + "\n".join(CALL.format(city) for city in cities[-1] if city)
    return thoughts + ('{"city": "Oslo"}' if "JSON" in prompt else "Hello, you < 3.")


def played() -> Wire:
    """The server, with a model that thinks, and calls in Qwen's notation."""
    running = Wire(Stack(make=Played))
    text = running.stack.service.text
    text.notation, text.ending = Notation(THINK, "qwen3_xml", READS), "<think>\n"
    text.tokens = {"<think>": 199, "</think>": 200}
    return running
