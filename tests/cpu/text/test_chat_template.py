import time

import pytest
from small_tokenizers import byte_level, files

from offroad.errors import RequestError, SettingsError
from offroad.text import chat_template as module
from offroad.text.chat_template import ChatTemplate, encode_with_marks
from offroad.text.tokenizer import Tokenizer

CHATML = """{{- bos_token }}
{%- for m in messages %}
{{- '<|user|>' + m.role + '\n' + m.content + '</s>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|user|>assistant\n' }}
{%- endif %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "on"},
]


def template(source, **more):
    return ChatTemplate(files("", chat_template=source), **more)


def shown(source, messages=TALK, **more):
    return template(source).render(messages, **more).text


def test_blocks_are_trimmed_and_tokens_known():
    assert shown(CHATML, TALK[:2]) == (
        "<s><|user|>system\nBe brief.</s>\n<|user|>user\nthe cat</s>\n<|user|>assistant\n"
    )
    assert shown(CHATML, TALK[:1], add_generation_prompt=False) == "<s><|user|>system\nBe brief.</s>\n"


def test_helpers_that_templates_use():
    assert shown("{{ {'a': '<é>', 'b': [1]} | tojson }}") == '{"a": "<é>", "b": [1]}'
    assert shown("{{ {'b': 1} | tojson(indent=2) }}") == '{\n  "b": 1\n}'
    assert shown("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}x{% endfor %}") == "xx"
    assert shown("{% generation %}a{{ messages | length }}{% endgeneration %}b") == "a4b"
    assert len(shown("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert shown("{{ thinking }}{{ tools is none }}", thinking=False) == "FalseTrue"
    assert shown("{{ tools[0].function.name }}", tools=[{"type": "function", "function": {"name": "f"}}]) == "f"


def test_marks_are_ends_of_the_system_part_and_user_turns():
    rendered = template(CHATML).render(TALK)
    ends = ["Be brief.</s>\n", "the cat</s>\n", "\non</s>\n"]
    assert rendered.marks == tuple(rendered.text.index(e) + len(e) for e in ends)


def test_a_later_turn_finds_the_marks_of_an_earlier_one():
    first = template(CHATML).render(TALK[:2])
    second = template(CHATML).render(TALK)
    assert set(first.marks) <= set(second.marks)
    assert all(first.text[:m] == second.text[:m] for m in first.marks)


def test_a_prefix_that_renders_otherwise_has_no_mark():
    last_only = "{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}"
    assert template(last_only).render(TALK, add_generation_prompt=False).marks == ()


def test_a_system_part_inside_the_first_user_turn_is_marked():
    source = (
        "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}"
        "{% if not rest %}{{ raise_exception('needs a user') }}{% endif %}{% endif %}"
        "{% for m in rest %}[{{ sys + ' ' if loop.first else '' }}{{ m.content }}]{% endfor %}"
    )
    rendered = template(source).render(TALK)
    assert rendered.text[: rendered.marks[0]] == "[Be brief. "


def test_a_system_part_of_the_templates_own_is_marked_and_a_bare_bos_is_not():
    own = "{{ bos_token }}{% if tools %}[{{ tools | length }}]{% endif %}"
    own += "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert template(own).render(TALK[1:2], tools=[{}]).marks == (len("<s>[1]"),)
    assert template(own).render([*TALK[1:2], *TALK[1:2]]).marks == (len("<s><the cat>"),)


def test_a_template_that_refuses_two_user_turns_is_marked_where_the_first_ones_text_is():
    source = (
        "{% if messages[0].role != 'user' or messages | length > 1 %}{{ raise_exception('one user turn') }}{% endif %}"
        "{{ bos_token }}tools:{{ tools | length }}[{{ messages[0].content }}]."
    )
    assert template(source).render(TALK[1:2], tools=[{}]).marks == (len("<s>tools:1["),)


def test_only_the_latest_turns_are_marked():
    talk = [{"role": r, "content": "x"} for _ in range(20) for r in ("user", "assistant")]
    assert len(template(CHATML).render(talk).marks) <= module.MARKED_TURNS + 1


def test_marks_in_tokens():
    tokenizer = Tokenizer(files(byte_level()))
    rendered = template(CHATML).render(TALK)
    ids, marks = encode_with_marks(tokenizer, rendered)
    assert ids == tokenizer.encode(rendered.text, add_special=False)
    assert ids.count(tokenizer.bos_id) == 1
    assert len(marks) == len(rendered.marks) == 3
    for mark, chars in zip(marks, rendered.marks, strict=True):
        assert tokenizer.decode(ids[:mark], skip_special=False) == rendered.text[:chars]


def test_a_very_long_prompt_has_no_marks(monkeypatch):
    tokenizer = Tokenizer(files(byte_level()))
    text = template(CHATML).render(TALK)
    ids, marks = encode_with_marks(tokenizer, text)
    assert marks
    monkeypatch.setattr(module, "_MARKED_CHARS", 10)
    assert encode_with_marks(tokenizer, text) == (ids, ())


def test_a_mark_inside_a_token_is_left_out():
    tokenizer = Tokenizer(files(byte_level()))
    text = "the cat"
    inside = [
        m
        for m in range(1, len(text))
        if text[:m] not in {tokenizer.decode(tokenizer.encode(text)[:k]) for k in range(10)}
    ]
    assert inside
    assert encode_with_marks(tokenizer, module.Rendered(text, tuple(inside)))[1] == ()


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}",
        "{% for m in messages %}[{{ m.content if m.content is string else m.content | tojson }}]{% endfor %}",
    ],
)
def test_content_parts_are_joined_for_templates_that_know_strings_only(source):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": r, "content": parts} for r in ("system", "user", "assistant", "tool")]
    assert shown(source, talk) == "[a\nb]" * 4


def test_a_template_that_knows_parts_in_one_role_gets_them_there():
    source = "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}<{{ p.text }}>{% endfor %}"
    source += "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": r, "content": parts} for r in ("system", "user", "assistant")]
    assert shown(source, talk) == "a\nb<a><b>a\nb"


def test_content_other_than_text_is_refused():
    with pytest.raises(RequestError, match="image_url") as e:
        shown(CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert e.value.param == "messages"
    with pytest.raises(RequestError, match="found: int"):
        shown(CHATML, [{"role": "user", "content": 5}])


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}, "", " ", None, {}])
def test_tool_calls_reach_the_template_as_objects(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    source = "{% set m = messages[0] %}[{{ m.content }}]{% for call in m.tool_calls %}"
    source += "{% for k, v in call.function.arguments | items %}{{ k }}={{ v + 1 }}{% endfor %}{% endfor %}"
    assert shown(source, talk) == ("[]x=2" if arguments and "x" in arguments else "[]")


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([{"function": {"name": "f", "arguments": "{x"}}], "JSON object"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], "JSON object"),
        ([{"function": {"name": "f", "arguments": 7}}], "JSON object"),
        ([{"function": {"name": "f", "arguments": "[" * 100_000}}], "JSON object"),
        ([{"name": "f"}], "calls of functions"),
        (7, "a list of calls"),
        ("f", "a list of calls"),
    ],
)
def test_tool_calls_of_another_form_are_refused(calls, said):
    with pytest.raises(RequestError, match=said) as e:
        shown("", [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert e.value.param == "messages"


def test_a_call_without_arguments_has_none():
    talk = [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    assert shown("{{ messages[0].tool_calls[0].function.arguments }}", talk) == "{}"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_the_template_under_the_names_that_templates_read(name):
    said = {"role": "assistant", "content": "a", name: "why", "reasoning_content" if name == "reasoning" else "x": None}
    assert shown("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}", [said]) == "why why"


def test_fields_that_are_null_are_left_out():
    said = {"role": "assistant", "content": "a", "tool_calls": None, "name": None, "reasoning_content": None}
    assert shown("{{ messages[0] | list | sort | join(' ') }}", [said]) == "content role"


def test_the_final_message_is_continued():
    talk = [*TALK[:2], {"role": "assistant", "content": "It sat "}]
    text = template(CHATML).render(talk, add_generation_prompt=False, continue_final_message=True).text
    assert text.endswith("<|user|>assistant\nIt sat ")
    with pytest.raises(RequestError, match="exclude"):
        template(CHATML).render(talk, continue_final_message=True)
    with pytest.raises(RequestError, match="final assistant message"):
        template(CHATML).render(TALK, add_generation_prompt=False, continue_final_message=True)


def test_without_a_template_the_next_step_is_named():
    with pytest.raises(RequestError, match=r"/v1/completions.*--chat-template"):
        template(None).render(TALK)
    with pytest.raises(RequestError, match="does not compile"):
        template("{% if %}").render(TALK)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only user') }}",
        "{{ nothing.x }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 2 ** 100000000 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ dict.pop(messages[0], 'role') }}",
    ],
)
def test_errors_of_a_template_are_the_requests(source):
    with pytest.raises(RequestError) as e:
        shown(source)
    assert e.value.param == "messages"


def test_output_and_time_are_limited(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARS", 100)
    with pytest.raises(RequestError, match="too long"):
        shown("{% for i in range(1000) %}abc{% endfor %}")
    monkeypatch.setattr(module, "MAX_SECONDS", -1.0)
    with pytest.raises(RequestError, match="takes too long"):
        shown("{% for i in range(10) %}a{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m(n) %}{% if n %}{% call m(n - 1) %}{% endcall %}{% call m(n - 1) %}{% endcall %}{% endif %}"
        "{% endmacro %}{{ m(60) }}",
        "{% for m in messages recursive %}{{ loop(messages) ~ loop(messages) }}{% endfor %}",
        "{% set n = namespace(x=0) %}{% for i in range(99999) %}{% set n.x = range(99999)|sum %}{% endfor %}{{ n.x }}",
    ],
)
def test_templates_that_say_nothing_for_ever_are_ended(monkeypatch, source):
    monkeypatch.setattr(module, "MAX_SECONDS", 0.1)
    began = time.monotonic()
    with pytest.raises(RequestError):
        shown(source)
    assert time.monotonic() - began < 5


def test_the_clock_changes_no_text():
    source = "{% for i in [1, 2] %} {{ loop.index }}{{ i }}\n{% else %}none{% endfor %}"
    source += "{% macro m(a) %}<{{ a }}>{% endmacro %}"
    assert shown(source + "{{ m(3) }}{% for i in [] %}x{% else %}none{% endfor %}") == " 11\n 22\n<3>none"


def test_variables_of_the_caller_do_not_replace_ours():
    with pytest.raises(RequestError) as e:
        shown(CHATML, bos_token="x")
    assert e.value.param == "chat_template_kwargs"
    with pytest.raises(RequestError, match="empty"):
        shown(CHATML, [])
    with pytest.raises(RequestError, match="role"):
        shown(CHATML, [{"content": "x"}])


def test_override(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("file {{ messages[0].content }}")
    assert template(CHATML, override=str(path)).render(TALK).text == "file Be brief."
    assert template(None, override="text {{ messages[0].content }}").render(TALK).text == "text Be brief."
    with pytest.raises(SettingsError, match="readable file"):
        template(None, override=str(tmp_path / "none.jinja"))
    with pytest.raises(SettingsError, match="compile"):
        template(None, override="{% if %}{{ x }}")


@pytest.mark.parametrize(
    "source",
    [
        CHATML + "{% for t in tools or [] %}\n  {{- t | tojson(indent=2) }}{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}\n{% endgeneration %}\n{% endfor %}",
        "{% set n = namespace(self=1, items=2) %}{% set n.a = n.self + n.items %}{{ n.a }}{{ dict(a=1).a }}",
        "{{ dict.fromkeys(['a', 'b'], 3) }}{{ tools[0].function | tojson(sort_keys=true, separators=(',', ':')) }}",
        "  {% for m in messages %}\n    {{ loop.previtem.role if loop.previtem }}{{ m.role }}\n  {% endfor %}\n",
    ],
)
def test_same_rendering_as_transformers(source):
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    tools = [{"type": "function", "function": {"name": "ä", "parameters": {"type": "object", "properties": {}}}}]
    theirs, _ = render([TALK], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>")
    assert shown(source, tools=tools) == theirs[0]
    assert theirs[0].strip()
