"""From a chat's body to what the engine runs and how the answer is read: shared by the APIs that chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from offroad.errors import RequestError
from offroad.sample.guide import Grammar, Guide, Thinking
from offroad.sample.params import SamplingParams
from offroad.sample.schema import with_properties
from offroad.serve.generation import fit
from offroad.serve.protocol.chat import ChatRequest
from offroad.serve.protocol.completion import CompletionRequest
from offroad.serve.protocol.shared import Generation
from offroad.serve.protocol.tools import NamedChoice, Tool, ToolChoice
from offroad.serve.text import Prompt, TextLayer, template_options
from offroad.text.answer import Notation, Reading
from offroad.text.reasoning import Thoughts, opened_by
from offroad.text.tools.registry import TOOL_PARSERS

_SWITCHES = frozenset({"enable_thinking", "thinking"})
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Chat:
    """A chat as it is submitted."""

    prompt: Prompt
    params: SamplingParams
    reading: Reading
    guide: Guide | None


def render(text: TextLayer, body: ChatRequest, defaults: dict[str, Any]) -> tuple[Prompt, Reading]:
    """The prompt, and how its answer is read; `defaults` are template variables for what the request leaves open.

    Raises RequestError for what the template or the model cannot do.
    """
    goes_on = bool(body.continue_final_message)
    opens = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    tools, choice = body.called()
    _check_tools(text.notation, tools, choice)
    named: dict[str, Any] = {"add_generation_prompt": opens, "continue_final_message": goes_on}
    if tools:
        named["tools"] = [tool.plain() for tool in tools]
    named |= _thinking(text.notation, body)
    options = {**defaults, **template_options(body.chat_template_kwargs, **named)}
    prompt = text.chat([message.plain() for message in body.messages], **options)
    thoughts, opened = begun(text.notation, prompt.text or "", goes_on)
    return prompt, Reading(
        thoughts=thoughts,
        opened=opened,
        tools=tuple(tool.plain() for tool in tools),
        calls=None if not tools or isinstance(choice, NamedChoice) else _calls(text.notation, choice),
        named=choice.function.name if isinstance(choice, NamedChoice) else None,
        several=body.parallel_tool_calls is not False,
    )


def begun(notation: Notation, prompt: str, goes_on: bool = False) -> tuple[Thoughts | None, bool]:
    """(how the answer to a prompt marks thoughts, None: it has none; whether the prompt has begun them). `goes_on`: the
    prompt ends within an answer, which has thoughts only if they are open."""
    if notation.thoughts is None:
        return None, False
    opened = opened_by(prompt, notation.thoughts)
    if opened is None or (goes_on and not opened):
        return None, False
    return notation.thoughts, opened


def read(text: TextLayer, body: ChatRequest, vocab: int, max_model_len: int, defaults: dict[str, Any]) -> Chat:
    """The whole of a chat. Raises RequestError. Takes time: call it from a thread."""
    params = body.sampling(text.generation, vocab)
    prompt, reading = render(text, body, defaults)
    params = fit(prompt, params, max_model_len, text.generation.get("max_new_tokens"), "messages", body.limit)
    guide = _guide(text, body, reading)
    if guide is not None and guide.grammar is not None:
        text.vocabulary()  # the engine will be told; here is the thread to find out
    return Chat(prompt, params, reading, guide)


def _check_tools(notation: Notation, tools: list[Tool], choice: ToolChoice) -> None:
    if not tools:
        return
    if "tools" not in notation.reads:
        raise RequestError(
            "the model's chat template has no place for tools",
            param="tools",
            code="unsupported_field",
            accepted="no tools",
            next="use another model, or start the server with --chat-template FILE",
        )
    if notation.tools is None and choice == "auto":
        raise RequestError(
            "it is not known how this model writes calls of tools",
            param="tools",
            code="unsupported_field",
            accepted='tool_choice "none", "required" or a name',
            next=f"start the server with --tool-call-parser {'|'.join(TOOL_PARSERS)}",
        )


def _calls(notation: Notation, choice: ToolChoice) -> str | None:
    """A grammar makes an answer that must call a list in JSON, whatever the model's own notation."""
    return "json" if choice == "required" else notation.tools


def _thinking(notation: Notation, body: ChatRequest) -> dict[str, Any]:
    """Template variables that turn thoughts on or off, and say how much of them."""
    thinks, switches = body.thinks(), _SWITCHES & notation.reads
    effort = body.reasoning_effort
    if thinks is not None and not switches and thinks != (notation.thoughts is not None):
        given = ("enable_thinking", "thinking", "reasoning_effort")
        field = next(name for name in given if getattr(body, name) is not None)
        raise RequestError(
            "the model always thinks" if notation.thoughts else "the model does not think",
            param=field,
            code="unsupported_field",
            found="a request to change that, which its chat template cannot",
            accepted=f"no {field}",
        )
    options: dict[str, Any] = {} if thinks is None else dict.fromkeys(switches, thinks)
    if effort not in (None, "none") and "reasoning_effort" in notation.reads:
        options["reasoning_effort"] = effort
    return options


def _guide(text: TextLayer, body: ChatRequest, reading: Reading) -> Guide | None:
    """What limits the answer: a grammar, the thoughts before it, their budget. Raises RequestError."""
    grammar, budget, (tools, choice) = body.grammar(), body.budget(), body.called()
    param = _grammar_field(body)
    escapes: tuple[int, ...] = ()
    if choice == "required" or isinstance(choice, NamedChoice):
        if grammar is not None:
            raise RequestError(param, param=param, found="a tool_choice that must be a call", accepted="one of the two")
        grammar, param = _calls_grammar(tools, choice, reading.several), "tool_choice"
    elif grammar is not None and tools:
        escapes = _escapes(text, reading, param)
    check_minimum(body.min_tokens, grammar, param)
    return guide_of(text, reading, grammar, budget, thinks=body.thinks(), escapes=escapes, param=param)


def guide_of(
    text: TextLayer,
    reading: Reading,
    grammar: Grammar | None,
    budget: int | None,
    *,
    thinks: bool | None,
    param: str,
    escapes: tuple[int, ...] = (),
) -> Guide | None:
    """What limits an answer to a grammar and a budget of thoughts; None: nothing. `thinks` False: the model was told
    not to. `param`: the request's field, for errors. Raises RequestError."""
    if reading.thoughts is None:
        budget = None  # there are no thoughts to limit
    if grammar is None and budget is None:
        return None
    name = param if grammar is not None else "thinking_token_budget"
    thinking = _thoughts(text, thinks, reading, budget, name)
    blanks = () if thinking is None else tuple(id for breaks in ("\n", "\n\n") for id in _token(text, breaks))
    return Guide(grammar, thinking, escapes, blanks, param)


def plain_guide(text: TextLayer, body: CompletionRequest) -> Guide | None:
    """What limits a completion: a grammar alone. Raises RequestError. Takes time: call it from a thread."""
    grammar, param = body.grammar(), _grammar_field(body)
    check_minimum(body.min_tokens, grammar, param)
    if grammar is None:
        return None
    text.vocabulary()
    return Guide(grammar, param=param)


def _grammar_field(body: Generation) -> str:
    return "response_format" if body.structured_outputs is None else "structured_outputs"


def check_minimum(min_tokens: int | None, grammar: Grammar | None, param: str) -> None:
    """Raises RequestError: a grammar may allow nothing but the end, where `min_tokens` forbids it."""
    if grammar is not None and min_tokens:
        raise RequestError("min_tokens", param="min_tokens", found=f"{param} too", accepted="one of the two")


def _thoughts(
    text: TextLayer, thinks: bool | None, reading: Reading, budget: int | None, param: str
) -> Thinking | None:
    """The thoughts before the answer, by their tokens."""
    if reading.thoughts is None or (thinks is False and not reading.opened):
        return None
    end, start = reading.thoughts.end, reading.thoughts.start
    end_id = text.token_id(end)
    # What follows the token that begins thoughts (a channel's name) is a part of them.
    starts = [start[:size] for size in range(len(start), 0, -1)]
    start_id = next((id for part in starts if (id := text.token_id(part)) is not None and len(part) > 1), None)
    if end_id is None or (start_id is None and not reading.opened):
        raise RequestError(
            f"{param} needs thoughts that end with a token of its own",
            param=param,
            code="unsupported_field",
            found=f"{end} in several tokens",
            accepted="a request that turns thoughts off",
        )
    return Thinking(end_id, None if reading.opened else start_id, reading.opened, budget)


def _token(text: TextLayer, piece: str) -> list[int]:
    """The token that a piece of text is, if it is one."""
    ids = text.prompt(piece, False).ids
    return ids if len(ids) == 1 else []


def _escapes(text: TextLayer, reading: Reading, param: str) -> tuple[int, ...]:
    """The tokens that begin a call, with which an answer may begin in place of what a grammar wants."""
    first = TOOL_PARSERS[reading.calls].tags[:1] if reading.calls else ()
    ids = tuple(id for tag in first if (id := text.token_id(tag)) is not None)
    if not ids:
        raise RequestError(
            f"{param} together with tools",
            param=param,
            code="unsupported_field",
            found="a model whose calls do not begin with a token of their own",
            accepted='one of the two, or tool_choice "required"',
        )
    return ids


def _calls_grammar(tools: list[Tool], choice: ToolChoice, several: bool) -> Grammar:
    """JSON: the arguments of the named function, or a list of calls."""
    schemas = {tool.function.name: with_properties(tool.function.parameters or _ANY_OBJECT) for tool in tools}
    if isinstance(choice, NamedChoice):
        return Grammar("json_schema", msgspec.json.encode(schemas[choice.function.name]).decode())
    defs: dict[str, Any] = {}
    entries = []
    for name, schema in schemas.items():
        own = dict(schema)
        for word in ("$defs", "definitions"):  # references are from the root, so there they must be
            for part, meaning in (own.pop(word, None) or {}).items():
                if defs.setdefault(word, {}).setdefault(part, meaning) != meaning:
                    found = f"two meanings of #/{word}/{part}"
                    raise RequestError("tools", param="tools", found=found, accepted="definitions that agree")
        entries.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": own},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": entries}, **defs}
    if not several:
        schema["maxItems"] = 1
    return Grammar("json_schema", msgspec.json.encode(schema).decode())
