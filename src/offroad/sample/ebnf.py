"""A look at a grammar before it is compiled: one with a rule that derives no text at all ends xgrammar and its process
by recursion without end (`root ::= root{3}`)."""

from __future__ import annotations

import re

# What a rule that xgrammar has normalised is made of: texts and classes of characters, repetitions, names, the rest.
_PART = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{(?P<least>\d+),[^}]*\}|(?P<name>[A-Za-z_][\w.-]*)|(?P<or>\|)'
)


def endless_rules(grammar: str) -> list[str]:
    """The rules of a grammar, as xgrammar prints it, that derive no text: each way to follow them leads to another such
    rule. Sequences there are of texts, classes, names and repeated names; a choice is at the top of its rule."""
    rules: dict[str, list[list[str]]] = {}
    for line in grammar.splitlines():
        name, found, body = line.partition(" ::= ")
        if found:
            rules[name] = _ways(body)
    ends: set[str] = set()
    while more := {
        name for name, ways in rules.items() if name not in ends and any(ends.issuperset(way) for way in ways)
    }:
        ends |= more
    return sorted(rules.keys() - ends)


def _ways(body: str) -> list[list[str]]:
    """For each alternative, the rules that it cannot do without."""
    ways: list[list[str]] = [[]]
    last = ""
    for part in _PART.finditer(body):
        if part["or"]:
            ways.append([])
        elif part["name"]:
            ways[-1].append(part["name"])
        elif part["least"] is not None and int(part["least"]) == 0 and last:
            ways[-1].pop()
        last = part["name"] or ""
    return ways
