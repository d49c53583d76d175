"""Settings: flags over a file over defaults; whatever is not known or not valid is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from offroad.errors import SettingsError
from offroad.settings import Settings


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "offroad.toml"
    path.write_text('model = "a"\nport = 9000\nmax-num-seqs = 3\n')
    settings = Settings.resolve({"port": 9001, "model": None}, path)
    assert (settings.model, settings.port, settings.max_num_seqs) == ("a", 9001, 3)
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"max_num_seq": 3}, "max_num_seqs"),
        ({"port": "80"}, "port"),
        ({"port": True}, "port"),
        ({"port": 70000}, "0 to 65535"),
        ({"dtype": "int8"}, "float16"),
        ({"kernel": ["attention"]}, "op=kernel"),
        ({"kernel": ["a=b", 1]}, "list of strings"),
        ({"ssl_keyfile": "x"}, "ssl-certfile"),
        ({"record_content": True}, "only with a record"),
        ({"max_body_mib": 0}, "1 to 1024"),
        ({"request_timeout": -1}, "no limit"),
        ({"served_model_name": ["a", ""]}, "not empty"),
        ({"memory_utilization": 0}, "more than 0"),
    ],
)
def test_what_is_not_valid_is_refused_with_what_is(values: dict, word: str):
    with pytest.raises(SettingsError, match=word):
        Settings.of(model="a", **values)


def test_a_model_is_needed():
    with pytest.raises(SettingsError, match="offroad serve"):
        Settings.of()


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings.of(model="a").port = 1


@pytest.mark.parametrize("text", ["port = ", 'colour = "red"'])
def test_a_bad_file_is_refused(tmp_path, text: str):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"bad\.toml"):
        Settings.resolve({"model": "a"}, path)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("reasoning_parser", "qwen9", "qwen3"),
        ("tool_call_parser", "xml", "qwen3_xml"),
        ("default_chat_template_kwargs", "{thinking}", "a JSON object"),
        ("default_chat_template_kwargs", "[1]", "a JSON object"),
    ],
)
def test_how_answers_are_read_is_checked(name: str, value: str, accepted: str):
    with pytest.raises(SettingsError, match=accepted) as refused:
        Settings.of(model="x", **{name: value})
    assert f"--{name.replace('_', '-')}" in str(refused.value)
    assert Settings.of(model="x", default_chat_template_kwargs='{"a": 1}').template_defaults() == {"a": 1}


def test_one_string_is_a_list_of_one():
    settings = Settings.of(model="m", served_model_name="x", kernel="linear=a")
    assert (settings.names, settings.kernel) == (("x",), ("linear=a",))
    assert Settings.of(model="m").names == ("m",)
