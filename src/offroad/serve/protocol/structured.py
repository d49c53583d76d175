"""What an answer must look like: `response_format` of OpenAI, `structured_outputs` of vLLM."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from pydantic import Field

from offroad.errors import RequestError
from offroad.sample.guide import Grammar
from offroad.sample.schema import not_followed
from offroad.serve.protocol.extent import check_extent
from offroad.serve.protocol.fields import Body, Strict, short


class JsonSchema(Strict):
    """`strict` is accepted with any value: an answer follows the schema, as far as docs/api.md says."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """One of these. `json` is a schema, as an object or as text; `grammar` is EBNF as xgrammar reads it."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None


class Structured(Body):
    """The two fields alone, as the Python API takes them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def grammar(self) -> Grammar | None:
        """What an answer must look like. Raises RequestError."""
        return grammar_of(self.response_format, self.structured_outputs)


def grammar_of(response: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    """The grammar that the two fields ask for; None: any text. Raises RequestError."""
    asked = [] if response is None else _of_response(response)
    given = [] if outputs is None else _of_outputs(outputs)
    if outputs is not None and len(given) != 1:
        found = f"{len(given)} of them"
        accepted = "one of json, json_object, regex, choice, grammar"
        raise RequestError("structured_outputs", param="structured_outputs", found=found, accepted=accepted)
    if asked and given:
        raise RequestError(
            "structured_outputs",
            param="structured_outputs",
            found="response_format too",
            accepted="one of the two",
        )
    return (asked or given or [None])[0]


def _of_response(response: ResponseFormat) -> list[Grammar]:
    if response.type != "json_schema":
        if response.json_schema is not None:
            raise RequestError(
                "response_format.json_schema",
                param="response_format.json_schema",
                found=f"type {response.type}",
                accepted='a schema only with type "json_schema"',
            )
        return [] if response.type == "text" else [Grammar("json_object")]
    if response.json_schema is None:
        raise RequestError(
            "response_format.json_schema is missing", param="response_format.json_schema", code="missing_field"
        )
    return [_followed(response.json_schema.schema_ or {}, "response_format")]


def _of_outputs(outputs: StructuredOutputs) -> list[Grammar]:
    found = []
    if outputs.json_ is not None:
        found.append(_followed(_schema(outputs.json_), "structured_outputs"))
    if outputs.json_object:
        found.append(Grammar("json_object"))
    if outputs.regex is not None:
        found.append(Grammar("regex", outputs.regex))
    if outputs.choice is not None:
        if not all(outputs.choice):
            param = "structured_outputs.choice"
            raise RequestError(param, param=param, found="an empty string", accepted="strings that are not empty")
        found.append(Grammar("ebnf", "root ::= " + " | ".join(json.dumps(text) for text in outputs.choice)))
    if outputs.grammar is not None:
        found.append(Grammar("ebnf", outputs.grammar))
    return found


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        param = "structured_outputs.json"
        raise RequestError(param, param=param, found=short(given), accepted="a JSON schema, as an object or as text")
    check_extent(schema, "structured_outputs.json")
    return schema


def _followed(schema: dict[str, Any], param: str) -> Grammar:
    """The grammar of a schema. Raises RequestError (`param`): an answer could not be held to all of it."""
    if (lost := not_followed(schema)) is not None:
        raise RequestError(
            f"{param} cannot be used",
            param=param,
            code="invalid_grammar",
            found=lost,
            accepted="a json_schema that can be followed",
            next="say it without that keyword, or leave it out and check the answer",
        )
    return Grammar("json_schema", msgspec.json.encode(schema).decode())
