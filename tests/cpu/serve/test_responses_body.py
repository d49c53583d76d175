"""Any body of /v1/responses is a request or an error that says why not."""

from __future__ import annotations

import contextlib
import json

from hypothesis import given
from hypothesis import strategies as st

from offroad.errors import RequestError
from offroad.serve.protocol.chat import ChatRequest
from offroad.serve.protocol.parse import parse
from offroad.serve.protocol.responses import NAMES, ResponsesRequest
from offroad.serve.protocol.shared import renamed

LEAF = st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.sampled_from(["", "a", "auto"])
ANY = st.recursive(
    LEAF, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(["type", "text"]), one)
)
TYPES = ["message", "function_call", "function_call_output", "reasoning", "item_reference", "input_text", "output_text"]
PART = st.fixed_dictionaries({"type": st.sampled_from(TYPES) | ANY}, optional={"text": st.text(max_size=3) | ANY})
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES) | ANY,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | ANY,
        "content": st.text(max_size=3) | st.lists(PART, max_size=2) | ANY,
        "output": st.text(max_size=3) | st.lists(PART, max_size=2) | ANY,
        "summary": st.lists(PART, max_size=2) | ANY,
        "call_id": st.just("c") | ANY,
        "name": st.just("f") | ANY,
        "arguments": st.sampled_from(["{}", "", "[1]", "{"]) | ANY,
        "encrypted_content": st.none() | ANY,
    },
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BODY = st.fixed_dictionaries(
    {"input": st.text(max_size=3) | st.lists(ITEM | ANY, max_size=4) | ANY},
    optional={
        "tools": st.just([TOOL]) | st.lists(ITEM, max_size=2) | ANY,
        "tool_choice": st.sampled_from(["auto", "required", {"type": "function", "name": "f"}]) | ANY,
        "text": st.fixed_dictionaries({"format": ITEM | ANY}) | ANY,
        "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["none", "low"]) | ANY}) | ANY,
        "instructions": st.text(max_size=3) | ANY,
        "max_output_tokens": st.integers(0, 3) | ANY,
        "stream": st.booleans() | ANY,
        "include": ANY,
        "thinking_token_budget": ANY,
        "structured_outputs": ANY,
        "store": ANY,
    },
)


@given(BODY)
def test_any_body(body):
    with contextlib.suppress(RequestError), renamed(NAMES):
        asked = parse(json.dumps(body).encode(), ResponsesRequest)
        chat = asked.chat()
        assert isinstance(chat, ChatRequest)
        assert not set(chat.model_fields_set) - set(ChatRequest.model_fields)
        chat.sampling({}, 300)
        chat.grammar()
        chat.called()
        chat.thinks()
        for message in chat.messages:
            assert message.plain()["role"] in ("system", "user", "assistant", "tool")
