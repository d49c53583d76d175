"""Schemas to which an answer can be held, and those to which it cannot."""

from __future__ import annotations

import pytest

from offroad.sample.schema import not_followed, with_properties

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
# (a schema, what of it is not followed, where): xgrammar takes answers that break each of them.
LOST = [
    ({"type": "string", "not": {"const": "a"}}, "not", ""),
    (A | {"if": {"required": ["a"]}, "then": B}, "if", ""),
    ({"type": "array", "items": TEXT, "contains": {"const": "a"}}, "contains", ""),
    (A | {"dependentRequired": {"a": ["b"]}}, "dependentRequired", ""),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems", ""),
    ({"allOf": [A, B]}, "allOf of several schemas", ""),
    (A | {"allOf": [B]}, "properties beside allOf", ""),
    (A | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "properties beside anyOf", ""),
    ({"$ref": "#/$defs/a", "required": ["b"], "$defs": {"a": A}}, "required beside $ref", ""),
    ({"anyOf": [A], "oneOf": [B]}, "anyOf beside oneOf", ""),
    ({"$ref": "https://example.org/a.json"}, "a $ref to another document", ""),
    ({"minimum": 3}, "minimum without a type", ""),
    ({"type": "object", "anyOf": [{"required": ["a"]}]}, "required without a type", "/anyOf/0"),
    ({"type": "object", "required": ["a"]}, "required without such a property", ""),
    (TEXT | {"pattern": "^[a-z]+$", "maxLength": 3}, "minLength or maxLength beside pattern", ""),
    ({"type": ["number", "null"], "multipleOf": 0.5}, "multipleOf of a number", ""),
    ({"properties": {"tags": {"items": {"not": TEXT}}}}, "not", "/properties/tags/items"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"prefixItems": [A, {"if": A}]}}}, "if", "/$defs/x/prefixItems/1"),
]


@pytest.mark.parametrize(("schema", "what", "where"), LOST)
def test_what_is_not_followed_is_found(schema, what, where):
    assert not_followed(schema) == f"{what} at #{where}"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        A,
        {"type": "object"},
        {"properties": {"not": INTEGER, "if": TEXT, "allOf": {"enum": [{"not": 1}]}}, "required": ["not"]},
        {"$ref": "#/$defs/a", "description": "as pydantic says it", "$defs": {"a": A}},
        {"anyOf": [INTEGER | {"minimum": 1}, {"type": "null"}], "default": None, "title": "Optional"},
        {"type": "object", "oneOf": [A, B], "discriminator": {"propertyName": "kind"}},
        {"allOf": [{"$ref": "#"}], "title": "one"},
        {"type": "array", "items": TEXT, "minItems": 1, "uniqueItems": False},
        TEXT | {"format": "uri", "minLength": 1, "maxLength": 2083},
        INTEGER | {"multipleOf": 5},
        {"const": "x", "minLength": 1, "default": {"not": 1}, "examples": [{"if": 2}]},
    ],
)
def test_what_is_followed_is_taken(schema):
    assert not_followed(schema) is None


def test_what_is_no_schema_is_left_to_the_compiler():
    for schema in (
        {"properties": []},
        {"anyOf": 3},
        {"$ref": 1},
        {"required": "a", "type": 1},
        {"allOf": {}},
        {"items": 0},
    ):
        assert not_followed(schema) is None


def test_properties_of_a_tool_are_kept_and_not_what_stands_beside_them():
    one_of = {"anyOf": [{"required": ["a"]}, {"required": ["anyOf"]}]}
    properties = {"a": {"type": "array", "items": A | one_of}, "anyOf": {"anyOf": [INTEGER, B | {"allOf": [A]}]}}
    kept = with_properties({"type": "object", "properties": properties, "$defs": {"x": A | {"$ref": "#"}}} | one_of)
    assert kept == {
        "type": "object",
        "properties": {"a": {"type": "array", "items": A}, "anyOf": {"anyOf": [INTEGER, B]}},
        "$defs": {"x": A},
    }
    for schema in ({"oneOf": [A, B]}, {"type": "object", "additionalProperties": False}, {"properties": []}, {}):
        assert with_properties(schema) == schema
