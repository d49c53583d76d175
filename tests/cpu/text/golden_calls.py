"""Answers with calls as models write them, and what is in them: for each notation the same arguments written down by
its rules, and answers that go wrong in its own ways.

The writers here say what a notation is; they know nothing of the parsers. `GOLDEN[name]` are cases
(answer, content, calls).
"""

from __future__ import annotations

import json
from typing import Any

Call = tuple[str, dict[str, Any]]
Case = tuple[str, str, list[Call]]


def tool(name: str, **properties: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


STRING = {"type": "string"}
TOOLS = [
    tool(
        "edit",
        path=STRING,
        old=STRING,
        new=STRING,
        count={"type": "integer"},
        ratio={"type": "number"},
        all={"type": "boolean"},
        tags={"type": "array", "items": STRING},
        options={"type": "object"},
        note={"anyOf": [STRING, {"type": "null"}]},
        level={"type": ["integer", "null"]},
    ),
    tool("now"),
    tool("get-weather.v2", city=STRING),
]
NOW: Call = ("now", {})


def edit(**arguments: Any) -> Call:
    return ("edit", arguments)


CODE = 'def f(a, b):\n\tif a < b and b > 0:\n\t\treturn f"{a}<{b}>"  # <b>\n\n\treturn {"x": [1, 2]}\n'
HTML = '<div class="a b"><p>x &amp; y</p><!-- <parameter> --></div>'
# Arguments that every notation can say.
ARGUMENTS: list[Call] = [
    NOW,
    edit(path="src/a.py"),
    ("get-weather.v2", {"city": "São Paulo"}),
    edit(new="Привет, мир! 你好 👩‍🚀 é ‮ع"),
    edit(new="if a < b && c >> d: vector<int> v = {1, 2};"),
    edit(new=HTML),
    edit(path="f.py", new=CODE),
    edit(old='C:\\dir\\"x" \\n \\u0041', new="back`tick` 'single'"),
    edit(new='{"name": "now", "arguments": {"a": [1, {"b": null}]}}'),
    edit(count=-42),
    edit(ratio=0.001, count=0),
    edit(all=True, level=None),
    edit(tags=["a, b", "[c]", "{d}", "e:f", ""]),
    edit(options={"deep": {"er": [1, [2, {"x": "y"}], []]}, "e": {}, "s": "t"}),
    edit(old="", new="x"),
    edit(path="007", old="true", new="null"),
    edit(new="a" * 500 + " " + "ж" * 100),
    edit(new="one\ntwo\n\n\nfive"),
    edit(path="a/b.py", old="x = 1", new="x = 2", count=1, all=False, tags=["t"], options={"k": "v"}, ratio=2.5),
    edit(new="</function_call> </tool> <|im_end|> <think> </p>"),
]


def cases(write, tie: str, margin: str = "\n") -> list[Case]:
    """Each of the arguments alone; two behind words; and three calls one after another."""
    alone = [(write([call]), "", [call]) for call in ARGUMENTS]
    two = [ARGUMENTS[6], ARGUMENTS[12]]
    three = [ARGUMENTS[1], NOW, ARGUMENTS[3]]
    words = "I will look at `a < b` first."
    return [
        *alone,
        (write(three), "", three),
        *([(words + margin + tie + write(two), words, two)] if tie is not None else []),
    ]


# --- qwen3_xml: strings as they are between line breaks, all else as JSON ---------------------------------------------
def xml(calls: list[Call]) -> str:
    return "\n".join(_xml(*call) for call in calls)


def _xml(name: str, arguments: dict[str, Any]) -> str:
    lines = ["<tool_call>", f"<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={key}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def px(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def xe(*parameters: str) -> str:
    return f"<tool_call>\n<function=edit>\n{''.join(parameters)}</function>\n</tool_call>"


XML_ODD: list[Case] = [
    ("<function=now>\n</function>", "", [NOW]),  # no outer tags
    ("<function=now>\n</function>\n</tool_call>\nDone.", "Done.", [NOW]),
    ("<tool_call><function=edit><parameter=path>x</parameter></function></tool_call>", "", [edit(path="x")]),
    (  # nothing ends the first value, nor the function
        "<tool_call>\n<function=edit>\n<parameter=path>\nx\n<parameter=count>\n3\n</tool_call>",
        "",
        [edit(path="x", count="3\n</tool_call>")],
    ),
    (xe(px('count', 'three')), "", [edit(count="three")]),
    (xe(px('all', 'True'), px('level', 'None')), "", [edit(all=True, level=None)]),
    (xe(px('new', chr(10) + 'x' + chr(10))), "", [edit(new="\nx\n")]),
    (xe(px('new', xml([NOW]).replace('</function>', '').strip())), "",
     [edit(new="<tool_call>\n<function=now>\n\n</tool_call>")]),  # tags of calls within a value
    (xe(px('tags', '[1, 2')), "", [edit(tags="[1, 2")]),
    (xe(px('ratio', 'NaN')), "", [edit(ratio="NaN")]),
    (xe(px('unknown', '12')), "", [edit(unknown="12")]),
    (f"<tool_call>\n<function=other>\n{px('x', '1')}</function>\n</tool_call>", "", [("other", {"x": "1"})]),
    ("<tool_call>\n{\"name\": \"now\"}\n</tool_call>", "<tool_call>\n{\"name\": \"now\"}\n</tool_call>", []),
    ("a <tool_call> b <function= c", "a <tool_call> b <function= c", []),
    ("Use `<tool_call>` to call.", "Use `<tool_call>` to call.", []),
    (xml([NOW]) + "\n\nand then <b>more</b>.\n", "and then <b>more</b>.\n", [NOW]),
    ("No call, just x < y.", "No call, just x < y.", []),
    ("", "", []),
]  # fmt: skip


# --- hermes: JSON in tags ---------------------------------------------------------------------------------------------
def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{plain(call)}\n</tool_call>" for call in calls)


def plain(call: Call, key: str = "arguments", ascii: bool = False) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=ascii)


def hx(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


TAGGED = edit(new="</tool_call> and <tool_call>")
HERMES_ODD: list[Case] = [
    (hermes([TAGGED]), "", [TAGGED]),  # its own tags within a string
    (hermes([TAGGED, NOW]), "", [TAGGED, NOW]),
    (hx(plain(ARGUMENTS[3], ascii=True)), "", [ARGUMENTS[3]]),  # \u escapes, also of pairs
    (hx(plain(NOW, "parameters")), "", [NOW]),
    (hx('{"name": "now"}'), "", [NOW]),
    (hx('{"arguments": {"path": "x"}, "name": "edit"}'), "", [edit(path="x")]),
    (hx(json.dumps({"name": "edit", "arguments": '{"path": "x"}'})), "", [edit(path="x")]),  # arguments as a text
    (hx(f"[{plain(NOW)}, {plain(edit(count=1))}]"), "", [NOW, edit(count=1)]),
    ("<tool_call>" + plain(edit(path="x")), "", [edit(path="x")]),  # no end tag
    (hx('{"name": "edit", "arguments": {"path": "x}}') + hermes([NOW]),
     hx('{"name": "edit", "arguments": {"path": "x}}'), [NOW]),
    (hx("{'name': 'now'}"), hx("{'name': 'now'}"), []),
    (hx('{"name": "edit", "arguments": {"ratio": NaN}}'), hx('{"name": "edit", "arguments": {"ratio": NaN}}'), []),
    (hx('{"name": "edit", "arguments": [1]}'), hx('{"name": "edit", "arguments": [1]}'), []),
    (hx('{"name": 3}'), hx('{"name": 3}'), []),
    (hx(""), hx(""), []),
    (hx("[" * 3000), hx("[" * 3000), []),
    ("Use `<tool_call>` so.", "Use `<tool_call>` so.", []),
    ("a </tool_call> b", "a </tool_call> b", []),
    (hermes([NOW]) + "\n\nIt is < 3.\n", "It is < 3.\n", [NOW]),
    ("", "", []),
]  # fmt: skip


# --- gemma4: keys bare, strings between quote tokens ------------------------------------------------------------------
def gemma(calls: list[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma(arguments)}<tool_call|>" for name, arguments in calls)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)


def gx(body: str) -> str:
    return f"<|tool_call>{body}<tool_call|>"


ENDED = edit(new="a <tool_call|> b {c")
GEMMA_ODD: list[Case] = [
    (gemma([ENDED]), "", [ENDED]),  # its end tag within a string
    (gemma([ENDED, NOW]) + "ok", "ok", [ENDED, NOW]),
    (gx("call:edit{ path : <|\"|>x<|\"|> , count : 1 }"), "", [edit(path="x", count=1)]),
    (gx("edit{count:1}"), "", [edit(count=1)]),  # no call:
    (gx("call:edit(count:1,path:<|\"|>)<|\"|>)"), "", [edit(count=1, path=")")]),  # parentheses
    (gx('call:edit{path:"a, b",tags:["c","d"]}'), "", [edit(path="a, b", tags=["c", "d"])]),  # plain quotes
    (gx('call:edit{<|"|>path<|"|>:<|"|>x<|"|>}'), "", [edit(path="x")]),
    (gx("call:edit{path:src/a.py,count:007}"), "", [edit(path="src/a.py", count="007")]),  # bare words
    (gx("call:edit{ratio:nan,level:1_000}"), "", [edit(ratio="nan", level="1_000")]),
    (gx('call:edit{new:<|"|>f(x) = {}}'), "", [edit(new="f(x) = {}")]),  # a string that is not closed
    (gx('call:edit{new:<|"|>x}') + gemma([NOW]), "", [edit(new="x"), NOW]),
    ("<|tool_call>call:edit{count:1}", "", [edit(count=1)]),  # no end tag
    (gx("call:edit{count:}"), gx("call:edit{count:}"), []),
    (gx("call:edit"), gx("call:edit"), []),
    (gx("call:edit{count:1} x"), gx("call:edit{count:1} x"), []),
    (gx("call:edit{a:[1,{b:2}"), gx("call:edit{a:[1,{b:2}"), []),
    (gx(""), gx(""), []),
    ("call:now{} is how to call", "call:now{} is how to call", []),
    ("a <|tool b", "a <|tool b", []),
    ("", "", []),
]  # fmt: skip


# --- llama3_json: an answer is nothing but JSON -----------------------------------------------------------------------
def llama(calls: list[Call]) -> str:
    return "; ".join(plain(call, "parameters") for call in calls)


LLAMA_ODD: list[Case] = [
    ("<|python_tag|>" + llama([NOW]), "", [NOW]),
    ("<|python_tag|> " + llama([NOW, edit(path=";")]) + ";", "", [NOW, edit(path=";")]),
    (" \n" + llama([NOW]) + "\n", "", [NOW]),
    (plain(edit(path="x")), "", [edit(path="x")]),  # the other name of arguments
    (llama([NOW]) + llama([NOW]), "", [NOW, NOW]),  # nothing between
    ('{"name": "now", "parameters": {}', '{"name": "now", "parameters": {}', []),
    ('{"name": "now", "parameters": {}} and words', '{"name": "now", "parameters": {}} and words', []),
    ('{"city": "Oslo"}', '{"city": "Oslo"}', []),
    ('{"name": "edit", "parameters": {"ratio": Infinity}}', '{"name": "edit", "parameters": {"ratio": Infinity}}', []),
    ('{"name": "edit", "parameters": {"ratio": 1e999}}', '{"name": "edit", "parameters": {"ratio": 1e999}}', []),
    ("<|python_tag|>print(1 < 2)", "<|python_tag|>print(1 < 2)", []),
    ("{" * 2000, "{" * 2000, []),
    ("Sure. " + llama([NOW]), "Sure. " + llama([NOW]), []),
    ("a < b", "a < b", []),
    ("", "", []),
]


# --- json: what a grammar makes of an answer that must call -----------------------------------------------------------
def listed(calls: list[Call]) -> str:
    return "[" + ", ".join(plain(call, "parameters") for call in calls) + "]"


JSON_ODD: list[Case] = [
    ("\n" + listed([NOW]) + "\n", "", [NOW]),
    (json.dumps([{"name": "edit", "parameters": {"path": "[x]"}}], indent=2), "", [edit(path="[x]")]),
    ('[{"name":"now","parameters":{}},', '[{"name":"now","parameters":{}},', []),
    ("[]", "[]", []),
    ("[1]", "[1]", []),
    ('[{"name": "now", "parameters": {}}] x', '[{"name": "now", "parameters": {}}] x', []),
    ("[" * 3000, "[" * 3000, []),
    ('{"name": "now", "parameters": {}}', '{"name": "now", "parameters": {}}', []),
    ("words [", "words [", []),
    ("", "", []),
]


# --- pythonic ---------------------------------------------------------------------------------------------------------
def python(calls: list[Call]) -> str:
    return "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for name, a in calls) + "]"


PYTHON_ODD: list[Case] = [
    ("[\n  now(),\n  edit(path='x',),\n]", "", [NOW, edit(path="x")]),
    ("[edit(path='''a\nb''', count=-1)]", "", [edit(path="a\nb", count=-1)]),
    ("[tools.edit(path='x')]", "", [("tools.edit", {"path": "x"})]),
    ("[edit(tags=('a', 'b'))]", "", [edit(tags=["a", "b"])]),
    ("[edit(new='a' 'b')]", "", [edit(new="ab")]),
    ("[edit('x')]", "[edit('x')]", []),  # not by name
    ("[edit(**{'path': 'x'})]", "[edit(**{'path': 'x'})]", []),
    ("[edit(path=open('x').read())]", "[edit(path=open('x').read())]", []),
    ("[edit(count=1+1), now()]", "[edit(count=1+1), now()]", []),
    ("[edit(tags={1, 2})]", "[edit(tags={1, 2})]", []),
    ("[edit(ratio=1e999)]", "[edit(ratio=1e999)]", []),
    ("[edit(new=b'x')]", "[edit(new=b'x')]", []),
    ("[now()", "[now()", []),
    ("[1, 2]", "[1, 2]", []),
    ("[]", "[]", []),
    ("[now() for x in y]", "[now() for x in y]", []),
    ("[" * 500, "[" * 500, []),
    ("[a](http://x)", "[a](http://x)", []),
    ("It is [now()]", "It is [now()]", []),
    ("", "", []),
]


# --- deepseek_v4: DSML ------------------------------------------------------------------------------------------------
def dsml(calls: list[Call]) -> str:
    return "<｜DSML｜tool_calls>\n" + "".join(_invoke(*call) for call in calls) + "</｜DSML｜tool_calls>"


def _invoke(name: str, arguments: dict[str, Any]) -> str:
    lines = [
        dx(k, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False), isinstance(v, str))
        for k, v in arguments.items()
    ]
    return "\n".join([f'<｜DSML｜invoke name="{name}">', *(lines or [""]), "</｜DSML｜invoke>", ""])


def dx(name: str, value: str, string: bool | None = True) -> str:
    flag = "" if string is None else f' string="{str(string).lower()}"'
    return f'<｜DSML｜parameter name="{name}"{flag}>{value}</｜DSML｜parameter>'


def di(*parts: str, name: str = "edit") -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "\n".join(parts) + "\n</｜DSML｜invoke>\n"


def dc(*invokes: str) -> str:
    return "<｜DSML｜tool_calls>\n" + "".join(invokes) + "</｜DSML｜tool_calls>"


DSML_ODD: list[Case] = [
    (dc(di(dx("new", "\n x \n"))), "", [edit(new="\n x \n")]),  # text as it is, blanks and all
    (dc(di(dx("new", xml([NOW]) + "</DSML|parameter>"))), "", [edit(new=xml([NOW]) + "</DSML|parameter>")]),
    (dc(di(dx("count", "3", True))), "", [edit(count=3)]),  # called a string, which the schema denies
    (dc(di(dx("path", "3", False))), "", [edit(path="3")]),
    (dc(di(dx("path", '"a\\nb"', False))), "", [edit(path="a\nb")]),
    (dc(di(dx("all", "True", False), dx("level", "None", False))), "", [edit(all=True, level=None)]),
    (dc(di(dx("tags", "[1, 2", False))), "", [edit(tags="[1, 2")]),
    (dc(di(dx("ratio", "NaN", False))), "", [edit(ratio="NaN")]),
    (dc(di(dx("path", "x", None), dx("count", "2", None))), "", [edit(path="x", count=2)]),  # nothing said of strings
    (dc(di(dx("arguments", '{"path": "x", "count": 2}', False))), "", [edit(path="x", count=2)]),  # all at once
    (dc(di(dx("input", '{"path": "x"}', True))), "", [edit(path="x")]),
    (dc(di(dx("arguments", '{"colour": 1}', False))), "", [edit(arguments={"colour": 1})]),
    (dc(di(dx("arguments", '{"path": 1}', False), dx("count", "2", False))),
     "", [edit(arguments={"path": 1}, count=2)]),
    (di(dx("path", "x")), "", [edit(path="x")]),  # no outer tags
    ("<｜DSML｜tool_calls>\n" + di(dx("path", "x")), "", [edit(path="x")]),
    (dc('<｜DSML｜invoke name="edit">\n<｜DSML｜parameter name="path" string="true">x\n'
        + dx("count", "2", False) + "\n</｜DSML｜invoke>\n"),
     "", [edit(path="x", count=2)]),  # the first value is not ended
    (dc('<｜DSML｜invoke name="edit">\n' + dx("path", "x") + "\n", _invoke(*NOW)), "", [edit(path="x"), NOW]),  # no end
    (dc(di(dx("path", "x") + " beside", dx("count", "2", False))), "beside", [edit(path="x", count=2)]),
    (dc(di('<｜DSML｜parameter nme="path">x</｜DSML｜parameter>')),
     '<｜DSML｜parameter nme="path">x</｜DSML｜parameter>', [edit()]),
    ("<｜DSML｜tool_calls>\nnothing\n</｜DSML｜tool_calls>",
     "<｜DSML｜tool_calls>\nnothing\n</｜DSML｜tool_calls>", []),
    ("<｜DSML｜tool_calls></｜DSML｜tool_calls>", "<｜DSML｜tool_calls></｜DSML｜tool_calls>", []),
    ('<｜DSML｜invoke nam="x">', '<｜DSML｜invoke nam="x">', []),
    (dsml([NOW]) + "\n\nDone, x < y.", "Done, x < y.", [NOW]),
    ("｜DSML｜ is a mark <｜DSML｜inv", "｜DSML｜ is a mark <｜DSML｜inv", []),
    ("", "", []),
]  # fmt: skip


GOLDEN: dict[str, list[Case]] = {
    "qwen3_xml": cases(xml, "\n") + XML_ODD,
    "hermes": cases(hermes, "") + HERMES_ODD,
    "gemma4": cases(gemma, "", "") + GEMMA_ODD,
    "llama3_json": cases(llama, None) + LLAMA_ODD,
    "json": cases(listed, None) + JSON_ODD,
    # A hyphen is not in a Python name.
    "pythonic": [case for case in cases(python, None) if "get-weather" not in case[0]] + PYTHON_ODD,
    "deepseek_v4": cases(dsml, "\n") + DSML_ODD,
}
