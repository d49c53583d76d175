"""Flags: all made from Settings, spelled as in vLLM, strict, and what was not given stays out."""

import dataclasses
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from offroad.cli.main import make_app
from offroad.cli.options import ALL_GROUPS, FLAGS, GroupedCommand, with_settings
from offroad.settings import Settings


def run(arguments: list[str]) -> tuple[Any, dict[str, Any]]:
    seen: dict[str, Any] = {}

    @with_settings(*ALL_GROUPS)
    def verb(model: Annotated[str, typer.Argument()], *, flags: dict[str, Any], config: str | None) -> None:
        seen.update(model=model, flags=flags, config=config)

    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=GroupedCommand)(verb)
    return CliRunner().invoke(app, arguments), seen


def test_every_setting_has_a_flag_with_help():
    fields = {field.name for field in dataclasses.fields(Settings)} - {"model"}
    assert set(FLAGS) == fields
    assert {flag.group for flag in FLAGS.values()} == set(ALL_GROUPS)


def test_what_is_not_given_is_absent():
    result, seen = run(["m"])
    assert result.exit_code == 0
    assert seen == {"model": "m", "flags": {}, "config": None}


def test_all_kinds_of_values_reach_the_settings():
    result, seen = run(
        [
            "m",
            "--max-model-len",
            "2048",
            "--served-model-name",
            "x",
            "--kernel",
            "linear=a",
            "--kernel",
            "attention=b",
            "--port",
            "0",
            "--memory-utilization",
            "0.5",
            "--no-enable-prefix-caching",
            "--offline",
            "--config",
            "f.toml",
        ]
    )
    assert result.exit_code == 0, result.output
    assert seen["config"] == "f.toml"
    settings = Settings.resolve({**seen["flags"], "model": seen["model"]})
    assert settings == Settings(
        model="m",
        max_model_len=2048,
        served_model_name=("x",),
        kernel=("linear=a", "attention=b"),
        port=0,
        memory_utilization=0.5,
        enable_prefix_caching=False,
        offline=True,
    )


def test_a_false_value_is_a_value():
    _, seen = run(["m", "--no-enable-prefix-caching", "--seed", "0"])
    assert seen["flags"] == {"enable_prefix_caching": False, "seed": 0}


def test_a_flag_wins_over_the_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('max_num_seqs = 4\n"max-model-len" = 512\n')
    _, seen = run(["m", "--max-num-seqs", "2", "--config", str(path)])
    settings = Settings.resolve({**seen["flags"], "model": "m"}, seen["config"])
    assert (settings.max_num_seqs, settings.max_model_len) == (2, 512)


@pytest.mark.parametrize("arguments", [["m", "--max-len", "3"], ["m", "--port", "x"], ["m", "extra"], []])
def test_wrong_usage_ends_with_2(arguments):
    result, seen = run(arguments)
    assert result.exit_code == 2
    assert not seen


def test_help_is_grouped_and_shows_defaults():
    result = CliRunner().invoke(make_app(), ["serve", "--help"])
    text = result.output
    places = [text.index(f"Options: {group}:") for group in ALL_GROUPS]
    assert places == sorted(places)
    assert text.index("Options: memory") < text.index("--max-model-len") < text.index("Options: speed")
    assert "(default: 8000)" in " ".join(text.split())


def test_run_has_no_serve_flags():
    result = CliRunner().invoke(make_app(), ["run", "m", "hi", "--port", "80"])
    assert result.exit_code == 2
    assert "--port" in result.output
