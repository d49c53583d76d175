"""Whatever the body, it is understood or refused with an error that names a field: nothing else comes out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad.errors import RequestError
from offroad.sample.params import SamplingParams
from offroad.serve.protocol.anthropic import MessagesRequest
from offroad.serve.protocol.chat import ChatRequest
from offroad.serve.protocol.completion import CompletionRequest
from offroad.serve.protocol.fields import CHAT_ONLY, HARMLESS, NEUTRAL, RENAMED
from offroad.serve.protocol.parse import parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
MESSAGE_KEYS = st.sampled_from(
    ["role", "content", "name", "tool_calls", "refusal", "mood", "type", "text", "reasoning", "reasoning_content"]
)
MESSAGES = st.lists(
    st.dictionaries(MESSAGE_KEYS, VALUES | st.sampled_from(["user", "assistant", "text"]), max_size=3), max_size=3
)
GOOD = {ChatRequest: {"messages": [{"role": "user", "content": "a"}]}, CompletionRequest: {"prompt": "a"}}


def names(kind) -> list[str]:
    return sorted({*kind.model_fields, *NEUTRAL, *CHAT_ONLY, *RENAMED, *HARMLESS, "surprise"})


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_body_is_understood_or_refused_by_name(kind, data):
    more = data.draw(st.dictionaries(st.sampled_from(names(kind)), VALUES | MESSAGES, max_size=2))
    body = GOOD[kind] | more
    try:
        request = parse(json.dumps(body).encode(), kind)
        params = request.sampling({}, vocab=100)
        request.grammar()
        if kind is ChatRequest:
            request.thinks(), request.budget(), request.called()
        if kind is CompletionRequest:
            request.prompts(vocab=100)
    except RequestError as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert error.param, (body, str(error))
        assert error.param.split(".")[0] in body, (body, error.param)
        return
    assert isinstance(params, SamplingParams)
    # What was accepted is either in the request or was worth nothing.
    for name, value in more.items():
        if name in kind.model_fields:
            assert getattr(request, name) is not None or value is None
        else:
            assert name in HARMLESS or value is None or value in (NEUTRAL | kind.neutral)[name], (name, value)


BLOCKS = st.lists(
    st.dictionaries(
        st.sampled_from(["type", "text", "id", "name", "input", "content", "tool_use_id", "thinking"]),
        VALUES | st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"]),
        max_size=4,
    ),
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_body_of_the_other_api_too(data):
    fields = st.sampled_from(sorted({*MessagesRequest.model_fields, *MessagesRequest.neutral, "surprise"}))
    more = data.draw(st.dictionaries(fields, VALUES | MESSAGES, max_size=2))
    turns = [{"role": role, "content": data.draw(BLOCKS | st.text(max_size=3))} for role in ("user", "assistant")]
    body = {"messages": turns, "max_tokens": 5} | more
    try:
        chat = parse(json.dumps(body).encode(), MessagesRequest).chat()
        params = chat.sampling({}, vocab=100)
    except RequestError as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert error.param, (body, str(error))
        return
    assert isinstance(params, SamplingParams)
    assert chat.messages


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes(raw):
    with pytest.raises(RequestError):
        parse(raw, ChatRequest)


def test_what_a_client_has_copied_is_left_out():
    said = {"role": "assistant", "content": "a", "reasoning": "b", "provider_specific_fields": {"reasoning": "b"}}
    body = {"messages": [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]}
    message = parse(json.dumps(body).encode(), ChatRequest).messages[1]
    assert message.plain() == {"role": "assistant", "content": "a", "reasoning": "b"}


def test_every_sampling_field_of_a_body_is_honoured():
    # A field of the body that is neither a sampling parameter nor known to be handled elsewhere would be ignored.
    elsewhere = {"model", "stream", "stream_options", "return_token_ids", "cache_salt", "add_special_tokens", "echo"}
    elsewhere |= {"messages", "prompt", "max_completion_tokens", "top_logprobs", "add_generation_prompt"}
    elsewhere |= {"continue_final_message", "chat_template_kwargs", "response_format", "structured_outputs"}
    elsewhere |= {"tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "thinking", "reasoning_effort"}
    elsewhere |= {"include_reasoning", "thinking_token_budget"}
    for kind in (ChatRequest, CompletionRequest):
        assert kind.model_fields.keys() - elsewhere <= set(SamplingParams.__struct_fields__)
        assert not (NEUTRAL | kind.neutral).keys() & kind.model_fields.keys()
