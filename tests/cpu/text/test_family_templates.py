"""Prompts of Qwen3.5 and Gemma-4, written out by hand from the rules of their chat formats, are what we render and what
transformers renders."""

from __future__ import annotations

import pytest
from family_templates import GEMMA, QWEN, assistant, call, flagged, ours, result, system, theirs, tool, user

from offroad.errors import RequestError

WEATHER = tool("weather", "Wetter für Orte", {"city": {"type": "string", "description": "Ort"}}, ["city"])
WEATHER_JSON = (
    '{"type": "function", "function": {"name": "weather", "description": "Wetter für Orte", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string", "description": "Ort"}}, "required": ["city"]}}}'
)
ADD = tool(
    "add",
    "Adds",
    {
        "values": {"type": "array", "items": {"type": "number"}, "description": "what"},
        "mode": {"type": "string", "enum": ["a", "b"], "nullable": True},
        "opts": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]},
    },
    [],
)
ADD_JSON = (
    '{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object", '
    '"properties": {"values": {"type": "array", "items": {"type": "number"}, "description": "what"}, '
    '"mode": {"type": "string", "enum": ["a", "b"], "nullable": true}, '
    '"opts": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}}, "required": []}}}'
)
HI = [user(" hi \n")]
# Arguments of every type, as an object here and as JSON text on the wire.
MANY = {"s": "two\nlines", "n": 3, "f": 0.5, "b": True, "z": None, "o": {"k": ["ü", False]}, "e": ""}
MANY_JSON = '{"s": "two\\nlines", "n": 3, "f": 0.5, "b": true, "z": null, "o": {"k": ["ü", false]}, "e": ""}'
PAST = [user("q1"), assistant("a1", reasoning_content="t1"), user("q2"), assistant("a2", reasoning_content="t2")]
AGENT = [
    user("q"),
    assistant(None, call("f", {"a": "x"}), call("g", {}, "c2"), reasoning_content="t1\n"),
    result("1", "c1"),
    result("zwei ü", "c2"),
    assistant("see", call("f", {"a": "y"}, "c3"), reasoning="t2"),
    result("3", "c3"),
]
QWEN_CALLS = (
    "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>\n"
)
QWEN_RESULTS = (
    "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\nzwei ü\n</tool_response><|im_end|>\n"
)
QWEN_SECOND = (
    "see\n\n<tool_call>\n<function=f>\n<parameter=a>\ny\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
)
QWEN_USER = "<|im_start|>user\nhi<|im_end|>\n"
QWEN_THINK, QWEN_OFF = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN_TOOLS = (
    "<|im_start|>system\n# Tools\n\nThese functions can be called:\n\n<tools>\n%s\n</tools>\n\nWrite a call so:\n\n"
    "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)


def many_in_qwen(truth: str, nothing: str) -> str:
    return (
        f"<|im_start|>user\nq<|im_end|>\n{QWEN_OFF}<tool_call>\n<function=f>\n"
        "<parameter=s>\ntwo\nlines\n</parameter>\n<parameter=n>\n3\n</parameter>\n<parameter=f>\n0.5\n</parameter>\n"
        f"<parameter=b>\n{truth}\n</parameter>\n<parameter=z>\n{nothing}\n</parameter>\n"
        '<parameter=o>\n{"k": ["ü", false]}\n</parameter>\n<parameter=e>\n\n</parameter>\n'
        f"</function>\n</tool_call><|im_end|>\n{QWEN_THINK}"
    )


QWEN_CASES = {
    "thinks by default": (QWEN, HI, {}, QWEN_USER + QWEN_THINK),
    "thinking on": (QWEN, HI, {"enable_thinking": True}, QWEN_USER + QWEN_THINK),
    "thinking off": (QWEN, HI, {"enable_thinking": False}, QWEN_USER + QWEN_OFF),
    "small: off by default": (flagged(QWEN, think_by_default=False), HI, {}, QWEN_USER + QWEN_OFF),
    "small: on": (flagged(QWEN, think_by_default=False), HI, {"enable_thinking": True}, QWEN_USER + QWEN_THINK),
    "no generation prompt": (QWEN, HI, {"add_generation_prompt": False}, QWEN_USER),
    "system": (QWEN, [system(" be ö "), *HI], {}, "<|im_start|>system\nbe ö<|im_end|>\n" + QWEN_USER + QWEN_THINK),
    "tools": (QWEN, HI, {"tools": [WEATHER]}, QWEN_TOOLS % WEATHER_JSON + "<|im_end|>\n" + QWEN_USER + QWEN_THINK),
    "tools come before the system text": (
        QWEN,
        [system("be ö\n"), *HI],
        {"tools": [WEATHER, ADD], "enable_thinking": False},
        QWEN_TOOLS % f"{WEATHER_JSON}\n{ADD_JSON}" + "\n\nbe ö<|im_end|>\n" + QWEN_USER + QWEN_OFF,
    ),
    "parts follow each other": (
        QWEN,
        [system([{"type": "text", "text": "S"}]), user([{"type": "text", "text": t} for t in (" a", "b ", "漢")])],
        {},
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nab 漢<|im_end|>\n" + QWEN_THINK,
    ),
    "arguments of every type": (QWEN, [user("q"), assistant(None, call("f", MANY))], {}, many_in_qwen("true", "null")),
    "arguments as JSON": (QWEN, [user("q"), assistant(None, call("f", MANY_JSON))], {}, many_in_qwen("true", "null")),
    "3.5 writes scalars as Python does": (
        flagged(QWEN, json_scalars=False),
        [user("q"), assistant("", call("f", MANY_JSON))],
        {},
        many_in_qwen("True", "None"),
    ),
    "thoughts of earlier turns go": (
        QWEN,
        PAST,
        {},
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nt2\n</think>\n\na2<|im_end|>\n" + QWEN_THINK,
    ),
    "thoughts are preserved": (
        QWEN,
        PAST[:3],
        {"preserve_thinking": True},
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n<think>\nt1\n</think>\n\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n" + QWEN_THINK,
    ),
    "3.8 preserves unless told not to": (
        flagged(QWEN, keep_thoughts_by_default=True),
        PAST[:3],
        {"preserve_thinking": False},
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
        + QWEN_THINK,
    ),
    "thoughts inside the content": (
        QWEN,
        [user("q1"), assistant("<think>\nt1\n</think>\n\na1"), user("q2"), assistant("<think>\nt2\n</think>\n\na2")],
        {"enable_thinking": False},
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nt2\n</think>\n\na2<|im_end|>\n" + QWEN_OFF,
    ),
    "calls and results after the last query keep their thoughts": (
        QWEN,
        AGENT,
        {},
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nt1\n</think>\n\n"
        + QWEN_CALLS
        + QWEN_RESULTS
        + "<|im_start|>assistant\n<think>\nt2\n</think>\n\n"
        + QWEN_SECOND
        + QWEN_THINK,
    ),
    "calls and results before it lose them": (
        QWEN,
        [*AGENT, assistant("done"), user("<tool_response> no")],
        {},
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        + QWEN_CALLS
        + QWEN_RESULTS
        + "<|im_start|>assistant\n"
        + QWEN_SECOND
        + "<|im_start|>assistant\ndone<|im_end|>\n<|im_start|>user\n<tool_response> no<|im_end|>\n"
        + QWEN_THINK,
    ),
    "a result in a user's turn is no query": (
        QWEN,
        [user("q"), assistant("a", reasoning_content="t"), user("<tool_response>\n1\n</tool_response>")],
        {},
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nt\n</think>\n\na<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n" + QWEN_THINK,
    ),
}

S = '<|"|>'
GEMMA_SMALL = flagged(GEMMA, no_thought_when_off=False)
GEMMA_USER, GEMMA_MODEL, GEMMA_OFF = "<|turn>user\nhi<turn|>\n", "<|turn>model\n", "<|channel>thought\n<channel|>"
GEMMA_WEATHER = (
    f"<|tool>declaration:weather{{description:{S}Wetter für Orte{S},parameters:{{properties:{{"
    f"city:{{description:{S}Ort{S},type:{S}STRING{S}}}}},required:[{S}city{S}],type:{S}OBJECT{S}}}}}<tool|>"
)
GEMMA_ADD = (
    f"<|tool>declaration:add{{description:{S}Adds{S},parameters:{{properties:{{"
    f"mode:{{enum:[{S}a{S},{S}b{S}],nullable:true,type:{S}STRING{S}}},"
    f"opts:{{properties:{{deep:{{type:{S}BOOLEAN{S}}}}},required:[{S}deep{S}],type:{S}OBJECT{S}}},"
    f"values:{{description:{S}what{S},items:{{type:{S}NUMBER{S}}},type:{S}ARRAY{S}}}}},type:{S}OBJECT{S}}}}}<tool|>"
)
GEMMA_CALLS = f"<|tool_call>call:f{{a:{S}x{S}}}<tool_call|><|tool_call>call:g{{}}<tool_call|>"
GEMMA_RESULTS = (
    f"<|tool_response>response:f{{value:{S}1{S}}}<tool_response|>"
    f"<|tool_response>response:g{{value:{S}zwei ü{S}}}<tool_response|>"
)
GEMMA_SECOND = (
    f"<|tool_call>call:f{{a:{S}y{S}}}<tool_call|><|tool_response>response:f{{value:{S}3{S}}}<tool_response|>see"
)
GEMMA_MANY = (
    "<s><|turn>user\nq<turn|>\n<|turn>model\n<|tool_call>call:f{"
    f"b:true,e:{S}{S},f:0.5,n:3,o:{{k:[{S}ü{S},false]}},s:{S}two\nlines{S},z:null}}<tool_call|><|tool_response>"
)
GEMMA_CASES = {
    "no thinking by default": (GEMMA, HI, {}, "<s>" + GEMMA_USER + GEMMA_MODEL + GEMMA_OFF),
    "small: nothing is said of thoughts": (GEMMA_SMALL, HI, {}, "<s>" + GEMMA_USER + GEMMA_MODEL),
    "thinking on": (
        GEMMA,
        HI,
        {"enable_thinking": True},
        "<s><|turn>system\n<|think|>\n<turn|>\n" + GEMMA_USER + GEMMA_MODEL,
    ),
    "system": (
        GEMMA,
        [system(" be ö "), *HI],
        {"enable_thinking": False},
        "<s><|turn>system\nbe ö<turn|>\n" + GEMMA_USER + GEMMA_MODEL + GEMMA_OFF,
    ),
    "tools come after the system text": (
        GEMMA,
        [system("be ö"), *HI],
        {"tools": [WEATHER, ADD], "enable_thinking": True},
        f"<s><|turn>system\n<|think|>\nbe ö{GEMMA_WEATHER}{GEMMA_ADD}<turn|>\n" + GEMMA_USER + GEMMA_MODEL,
    ),
    "tools alone": (
        GEMMA_SMALL,
        HI,
        {"tools": [WEATHER]},
        f"<s><|turn>system\n{GEMMA_WEATHER}<turn|>\n" + GEMMA_USER + GEMMA_MODEL,
    ),
    "parts are stripped, the system's get a space": (
        GEMMA_SMALL,
        [system([{"type": "text", "text": "S "}]), user([{"type": "text", "text": t} for t in (" a", "b ", "漢")])],
        {},
        "<s><|turn>system\nS <turn|>\n<|turn>user\nab漢<turn|>\n" + GEMMA_MODEL,
    ),
    "arguments of every type": (GEMMA, [user("q"), assistant(None, call("f", MANY))], {}, GEMMA_MANY),
    "arguments as JSON": (GEMMA, [user("q"), assistant(None, call("f", MANY_JSON))], {}, GEMMA_MANY),
    "thoughts of earlier turns go": (
        GEMMA,
        [*PAST[:3], assistant("<|channel>thought\nt2<channel|> a2"), user("q3")],
        {},
        "<s><|turn>user\nq1<turn|>\n<|turn>model\na1<turn|>\n<|turn>user\nq2<turn|>\n<|turn>model\na2<turn|>\n"
        "<|turn>user\nq3<turn|>\n<|turn>model\n" + GEMMA_OFF,
    ),
    "results stay in the model's turn, with the thoughts between calls": (
        GEMMA,
        AGENT,
        {"enable_thinking": True},
        "<s><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nq<turn|>\n<|turn>model\n<|channel>thought\nt1\n\n<channel|>"
        f"{GEMMA_CALLS}{GEMMA_RESULTS}<|channel>thought\nt2\n<channel|>{GEMMA_SECOND}<turn|>\n<|channel>thought\n",
    ),
    "without thinking the turn goes on at once": (
        GEMMA,
        AGENT[:4],
        {},
        f"<s><|turn>user\nq<turn|>\n<|turn>model\n<|channel>thought\nt1\n\n<channel|>{GEMMA_CALLS}{GEMMA_RESULTS}",
    ),
    "calls of earlier turns lose their thoughts": (
        GEMMA_SMALL,
        [*AGENT[:4], assistant("done"), user("q2")],
        {},
        f"<s><|turn>user\nq<turn|>\n<|turn>model\n{GEMMA_CALLS}{GEMMA_RESULTS}done<turn|>\n"
        "<|turn>user\nq2<turn|>\n<|turn>model\n",
    ),
    "calls keep their thoughts if told so": (
        GEMMA_SMALL,
        [*AGENT[:4], assistant("done", reasoning_content="t2"), user("q2")],
        {"preserve_thinking": True},
        f"<s><|turn>user\nq<turn|>\n<|turn>model\n<|channel>thought\nt1\n\n<channel|>{GEMMA_CALLS}{GEMMA_RESULTS}"
        "done<turn|>\n<|turn>user\nq2<turn|>\n<|turn>model\n",
    ),
    "Gemma's own form of results": (
        GEMMA,
        [user("q"), assistant(None, call("f", {}), tool_responses=[{"name": "f", "response": {"t": 15, "at": "ü"}}])],
        {},
        f"<s><|turn>user\nq<turn|>\n<|turn>model\n<|tool_call>call:f{{}}<tool_call|>"
        f"<|tool_response>response:f{{at:{S}ü{S},t:15}}<tool_response|>",
    ),
}
CASES = {
    f"{family}: {name}": case
    for family, cases in (("qwen", QWEN_CASES), ("gemma", GEMMA_CASES))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_the_prompt_is_the_one_of_the_rules(name):
    template, messages, options, golden = CASES[name]
    assert ours(template, messages, **options).text == golden
    assert theirs(template, messages, **options) == golden


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([system("s")], "no query"),
        ([user("<tool_response>\n1\n</tool_response>")], "no query"),
        ([user("q"), system("s")], "comes first"),
        ([user("q"), {"role": "critic", "content": "x"}], "No such role: critic"),
    ],
)
def test_what_the_template_refuses_is_the_requests_fault(messages, said):
    with pytest.raises(RequestError, match=said) as e:
        ours(QWEN, messages)
    assert e.value.param == "messages"
    with pytest.raises(Exception, match=said):
        theirs(QWEN, messages)


@pytest.mark.parametrize("template", [QWEN, GEMMA])
@pytest.mark.parametrize("content", ["It sat ", [{"type": "text", "text": "It "}, {"type": "text", "text": "sat\n"}]])
def test_a_stripped_final_message_is_continued_without_its_space(template, content):
    talk = [user("q"), assistant(content)]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    text = ours(template, talk, **options).text
    assert text.endswith("It sat" if template == QWEN or isinstance(content, str) else "Itsat")
    assert text == theirs(template, talk, **options)
