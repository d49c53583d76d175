"""Verbs with stand-ins for the parts behind them: what is printed, as text and as JSON, and with which exit code."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from offroad.cli import doctor, serve, show
from offroad.cli.environment import VARIABLES, in_force
from offroad.cli.progress import LoadProgress
from offroad.cli.table import size, table
from offroad.device.profile import load_profile
from offroad.errors import ModelNotFound, PlanError
from offroad.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, RopeSpec
from offroad.native.compile import CompileError
from offroad.ops.spec import Registry, Verdict
from offroad.weights.source import TensorHeader, TokenizerFiles


def put(monkeypatch, name, **attributes):
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**attributes))
    package, _, last = name.rpartition(".")
    monkeypatch.setattr(sys.modules[package], last, sys.modules[name], raising=False)


def tiny_spec() -> ModelSpec:
    def layer(window):
        mixer = AttentionSpec(4, 2, 16, 0.25, RopeSpec(16, 1e4), window)
        return LayerSpec(mixer, FfnSpec(128, "silu"), (), (), ())

    return ModelSpec("tiny", 64, 1000, 2048, 1e-5, (layer(None), layer(512), layer(512)), "embed", ())


@pytest.fixture
def source(monkeypatch):
    """A checkpoint of three layers, behind `open_source`."""
    headers = {
        "a": TensorHeader("a", (10, 64), "f32", 2560),
        "b": TensorHeader("b", (1000, 64), "gguf.q4_1", 40000),
        "c": TensorHeader("c", (64,), "f32", 256),
    }
    files = TokenizerFiles("{}", "{{ messages }}", None, None, (2,), False, {})
    made = SimpleNamespace(
        path=Path("/models/tiny.gguf"),
        config={"architectures": ["TinyForCausalLM"]},
        headers=headers,
        conventions=frozenset(),
        tokenizer=lambda: files,
    )

    def open_source(settings, progress):
        progress(0.5, settings.model)
        return made

    put(monkeypatch, "offroad.weights.locate", open_source=open_source)
    put(monkeypatch, "offroad.models.registry", resolve_model=lambda config: SimpleNamespace(spec=tiny_spec()))
    return made


def test_show(offroad, source):
    code, out, _ = offroad("show", "tiny")
    assert code == 0
    facts = {line[:14].strip(): line[14:] for line in out.splitlines() if line[:14].strip()}
    assert facts["architecture"] == "TinyForCausalLM (tiny)"
    assert facts["layers"] == "3 (2 of them with a window of 512)"
    assert facts["heads"] == "4 query, 2 KV, of 16"
    assert facts["context"] == "2,048 tokens"
    assert facts["template"] == "yes"
    assert facts["stored as"] == "gguf.q4_1: 1 tensors, 39.1 KiB"


def test_show_json(offroad, source):
    code, out, _ = offroad("show", "tiny", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["parameters"] == 640 + 64000 + 64
    assert facts["nbytes"] == 2560 + 40000 + 256
    assert facts["stored"] == [
        {"kind": "gguf.q4_1", "tensors": 1, "nbytes": 40000},
        {"kind": "f32", "tensors": 2, "nbytes": 2816},
    ]


def test_show_says_that_a_template_is_missing(source):
    facts = show.describe("tiny", source) | {"chat_template": False}
    assert "none: chat is refused" in show.render(facts)


def test_plan(offroad, source, monkeypatch):
    seen = []

    def make_plan(settings, given):
        seen.append((settings.device, settings.max_num_seqs, given))
        return SimpleNamespace(explain=lambda: "layers 0-2 attention.decode triton.paged", to_json=lambda: {"cells": 3})

    put(monkeypatch, "offroad.engine", make_plan=make_plan)
    code, out, _ = offroad("plan", "tiny", "--device", "v100-32gb", "--max-num-seqs", "2")
    assert (code, out) == (0, "layers 0-2 attention.decode triton.paged\n")
    assert seen == [("v100-32gb", 2, source)]
    code, out, _ = offroad("plan", "tiny", "--json")
    assert json.loads(out) == {"cells": 3}


def test_a_plan_with_open_cells_ends_with_3(offroad, source, monkeypatch):
    def make_plan(settings, given):
        raise PlanError(
            "no kernel for 2 cells on v100-32gb", found="\n0 attention", accepted="a kernel", next="--allow-reference"
        )

    put(monkeypatch, "offroad.engine", make_plan=make_plan)
    code, out, err = offroad("plan", "tiny")
    assert (code, out) == (3, "")
    assert "no kernel for 2 cells" in err
    assert "0 attention" in err


def test_wrong_settings_end_with_2_and_name_the_flag(offroad):
    code, _, err = offroad("plan", "tiny", "--max-num-seqs", "0")
    assert code == 2
    assert "--max-num-seqs" in err
    assert "1 to 4096" in err


@pytest.fixture
def store(monkeypatch):
    """A store with one whole and one damaged model, and a demo model that is not there."""

    def entry(name, nbytes, complete):
        facts = {"name": name, "path": f"/m/{name}", "nbytes": nbytes, "format": "gguf", "complete": complete}
        return SimpleNamespace(**facts, to_json=lambda: facts)

    def pull(name, progress):
        progress(0.5, f"{name}: 1 of 2 MB")
        return Path("/m") / name

    def remove(name):
        raise ModelNotFound(f"model {name}", found="not there", next="see `offroad list`")

    put(
        monkeypatch, "offroad.weights.store", pull=pull, remove=remove,
        list_models=lambda: [entry("one", 3 * 1024**2, True), entry("two", 10, False)],
        DEMO_MODELS={"one": SimpleNamespace(nbytes=1), "demo": SimpleNamespace(nbytes=2048)},
    )  # fmt: skip
    return sys.modules["offroad.weights.store"]


def test_list(offroad, store):
    code, out, _ = offroad("list")
    assert code == 0
    assert [line.split()[:5] for line in out.splitlines()[1:]] == [
        ["one", "gguf", "3.0", "MiB", "ready"],
        ["two", "gguf", "10", "B", "incomplete"],
        ["demo", "gguf", "2.0", "KiB", "not"],
    ]
    _, out, _ = offroad("list", "--json")
    assert [(entry["name"], entry["complete"]) for entry in json.loads(out)] == [("one", True), ("two", False)]


def test_pull_prints_the_path_alone_on_stdout(offroad, store):
    code, out, err = offroad("pull", "one")
    assert (code, out) == (0, "/m/one\n")
    assert "1 of 2 MB" in err


def test_rm(offroad, store, monkeypatch):
    code, _, err = offroad("rm", "other")
    assert code == 2
    assert "offroad list" in err
    monkeypatch.setattr(store, "remove", lambda name: 2048)
    assert offroad("rm", "one")[:2] == (0, "removed one: 2.0 KiB\n")


def test_the_screen_says_where_and_what():
    info = SimpleNamespace(
        model="tiny",
        family="llama",
        max_model_len=2048,
        max_num_seqs=4,
        device="Test CPU",
        dtype="float32",
        memory_summary="weights 0.1 GiB",
        compiled="",
        plan_fingerprint="abc123",
        load_seconds=1.25,
        plan_summary="linear native\nattention torch",
    )
    text = serve.screen("http://127.0.0.1:8000", info)
    assert "http://127.0.0.1:8000/v1" in text
    assert "2,048 tokens" in text
    assert "up to 4 sequences" in text
    assert "abc123" in text
    assert "attention torch" in text
    assert len(text.splitlines()) < 24


def test_progress_without_a_terminal_is_a_line_a_phase():
    stream = io.StringIO()
    with LoadProgress(stream=stream) as progress:
        progress("pull", 0.0, "tiny")
        progress("pull", 0.5, "tiny")
        progress("plan", 0.0, "")
        progress("load", 1.0, "ready")
    assert stream.getvalue() == "pull     tiny\nplan\nload     ready\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_ends_each_phase_and_survives_an_error():
    stream = Terminal()
    with pytest.raises(RuntimeError), LoadProgress(stream=stream) as progress:
        progress("pull", 0.25, "tiny")
        progress("load", 0.5, "half")
        raise RuntimeError
    text = stream.getvalue()
    assert "pull" in text
    assert "100%" in text  # the phase before
    assert progress.bars.finished is False  # the one that failed is not shown as done


def test_table_and_size():
    assert table(("NAME", "N"), [("a", 5), ("bcdef", 123)]) == "NAME     N\na        5\nbcdef  123"
    assert table(("NAME", "N"), []) == "NAME  N"
    assert [size(n) for n in (0, 1023, 1024, 1536 * 1024, 3 * 1024**3)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "3.00 GiB",
    ]


def test_the_environment_is_a_short_table_and_hides_secrets(monkeypatch):
    assert len(VARIABLES) < 10
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("HF_HOME", "/somewhere")
    found = in_force()
    assert found["HF_TOKEN"] == "(set)"
    assert found["CC"] is None
    assert found["HF_HOME"] == "/somewhere"


def fake_kernel(name, op, test):
    return SimpleNamespace(name=name, op=op, reference=False, check=test)


def test_kernels_are_asked_with_usual_problems():
    registry = Registry()
    registry.kernels["a"] = fake_kernel("a", "linear", lambda device, p: Verdict("gguf.q4_1" in p.stored, "reads q4_1"))
    registry.kernels["b"] = fake_kernel("b", "attention", lambda device, p: Verdict(False, "needs avx512"))
    facts = doctor.kernel_facts(registry, load_profile("cpu-avx2"))
    assert [(f["kernel"], f["ok"], f["reason"]) for f in facts] == [
        ("b", False, "needs avx512"),
        ("a", True, "reads q4_1"),
    ]


def test_every_op_has_a_sample_problem():
    from offroad.ops.registry import default_registry

    computed = {name for name, op in default_registry().ops.items() if op.reference is not None}
    assert {problem.op for problem in doctor.sample_problems("float32")} == computed


def test_doctor(offroad, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("offroad.native.compile.build", lambda compiler: Path("/cache/kernels.so"))
    code, out, _ = offroad("doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["device"]["units"] >= 1
    assert "v100-32gb" in facts["profiles"]
    assert any(kernel["ok"] for kernel in facts["kernels"])
    code, out, _ = offroad("doctor")
    assert code == 0
    assert "KERNEL" in out
    assert "/cache/kernels.so" in out
    assert "OFFROAD_HOME" in out


def test_doctor_shows_what_the_compiler_said(offroad, monkeypatch):
    def build(compiler):
        raise CompileError("the C compiler refused the CPU kernels", found="exit 1: no such option")

    monkeypatch.setattr("offroad.native.compile.build", build)
    code, out, _ = offroad("doctor")
    assert code == 0
    assert "problem: the C compiler refused the CPU kernels; found: exit 1: no such option" in out
    assert "not built" in out


def test_doctor_reports_a_broken_compiler_and_goes_on(offroad, monkeypatch):
    monkeypatch.setenv("CC", "/no/such/compiler")
    code, out, _ = offroad("doctor")
    assert code == 0
    assert "problem: C compiler in $CC" in out
