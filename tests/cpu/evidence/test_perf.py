"""The benchmark: definitions on made-up samples, prompts, records, ratios, the engine and the server as targets."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offroad.cli import bench
from offroad.errors import OffroadError, SettingsError
from offroad.evidence import perf
from offroad.evidence.perf import Load, Sample
from offroad.schedule.request import TokenEvent

LOAD = Load((1, 2), prompt_tokens=10, output_tokens=3, repeat=2)


def test_definitions_on_one_round():
    a = Sample([0.5, 0.6, 0.8], [1, 1, 1])
    b = Sample([1.0, 1.5], [1, 2])
    summary = perf.summarise([[a, b]], LOAD)
    assert summary["ttft_ms"] == pytest.approx(750)
    assert summary["ttft_max_ms"] == pytest.approx(1000)
    assert summary["itl_ms"] == pytest.approx(200)  # gaps 100, 200, 500
    assert summary["decode_tok_s"] == pytest.approx(4 / 1.0)  # four later tokens, from 0.5 to 1.5
    assert summary["prefill_tok_s"] == pytest.approx(20 / 1.0)
    assert summary["throughput_tok_s"] == pytest.approx(6 / 1.5)


def test_speeds_are_medians_of_rounds():
    rounds = [[Sample([1.0, 1.0 + gap], [1, 1])] for gap in (0.1, 0.2, 1.0)]
    assert perf.summarise(rounds, LOAD)["decode_tok_s"] == pytest.approx(5.0)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99]))
def test_percentile(values, fraction):
    found = perf.percentile(values, fraction)
    assert found in values
    assert sum(v <= found for v in values) >= fraction * len(values) - 1e-9
    assert sum(v < found for v in values) < math.ceil(fraction * len(values) - 1e-9)


def test_prompts_are_the_same_each_time_and_share_nothing():
    prompts = perf.prompts_for(LOAD, 1000, 8, 0)
    assert prompts == perf.prompts_for(LOAD, 1000, 8, 0)
    assert len({tuple(p) for p in [*prompts, *perf.prompts_for(LOAD, 1000, 8, 1)]}) == 16
    assert all(32 <= token < 1000 for prompt in prompts for token in prompt)


class FakeTarget:
    def __init__(self):
        self.rounds = []

    def facts(self):
        return {
            "kind": "engine",
            "model": "tiny",
            "device": "Test",
            "dtype": "float32",
            "plan_fingerprint": "f1",
            "max_num_seqs": 8,
        }

    def vocab(self):
        return 100

    def round(self, prompts, output_tokens):
        self.rounds.append((len(prompts), len(prompts[0]), output_tokens))
        return [Sample([0.1 * (i + 1) for i in range(output_tokens)], [1] * output_tokens) for _ in prompts]

    def close(self):
        self.closed = True


def make_record():
    target = FakeTarget()
    points = perf.sweep(target, LOAD, lambda note: None)
    return target, perf.record(target, LOAD, points, ["offroad", "bench", "tiny"])


def test_a_sweep_warms_up_and_repeats():
    target, record = make_record()
    assert target.rounds == [(1, 10, 3), (1, 10, 3), (1, 10, 3), (2, 10, 3), (2, 10, 3)]
    assert [point["concurrency"] for point in record["points"]] == [1, 2]


def test_a_record_can_be_checked(tmp_path):
    _, record = make_record()
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    read = perf.read_record(path)
    point = read["points"][1]
    samples = [[Sample(**sample) for sample in samples] for samples in point["rounds"]]
    assert perf.summarise(samples, LOAD) == point["summary"]
    assert read["command"] == ["offroad", "bench", "tiny"]
    assert read["target"]["plan_fingerprint"] == "f1"
    assert read["versions"]["torch"]


def test_ratios_and_what_makes_them_doubtful():
    _, new = make_record()
    old = json.loads(json.dumps(new))
    for point in old["points"]:
        point["summary"]["decode_tok_s"] *= 2
    old["target"]["device"] = "Another"
    [one, two] = perf.ratios(new, old)
    assert one["ratios"]["decode_tok_s"] == pytest.approx(0.5)
    assert two["ratios"]["ttft_ms"] == pytest.approx(1.0)
    assert perf.differences(new, old) == ["target.device: Test now, Another in the baseline"]
    text = perf.render_ratios(new, old)
    assert "differs: target.device" in text
    assert "0.500" in text


def test_ratios_need_a_common_concurrency():
    _, new = make_record()
    with pytest.raises(SettingsError, match="concurrency"):
        perf.ratios(new, new | {"points": [{"concurrency": 64, "summary": {}}]})


def test_token_ids_are_counted_where_the_server_tells_them(api):
    api.ids = True
    events = [
        {"choices": [{"text": "", "token_ids": [7]}]},
        {"choices": [{"text": "ab", "token_ids": [8, 9]}]},
        {"choices": [{"text": "rest", "token_ids": []}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    api.text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    [sample] = api.round([[1, 2]], 3)
    assert sample.tokens == [1, 2]
    assert api.bodies[0]["return_token_ids"] is True


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other"}'])
def test_other_files_are_no_baseline(tmp_path, text):
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match="baseline"):
        perf.read_record(path)


class FakeEngine:
    """Gives each request one token a step, the last with a reason."""

    def __init__(self, reason="length"):
        self.info = SimpleNamespace(model="m", device="d", dtype="f", plan_fingerprint="p", max_num_seqs=2, vocab=100)
        self.left, self.reason, self.requests = {}, reason, []

    def submit(self, request):
        self.requests.append(request)
        self.left[request.id] = request.params.max_tokens

    def has_work(self):
        return bool(self.left)

    def step(self):
        events = []
        for name in list(self.left):
            self.left[name] -= 1
            last = self.left[name] == 0
            if last:
                del self.left[name]
            events.append(
                TokenEvent(request_id=name, index=0, token_ids=[5], finish_reason=self.reason if last else None)
            )
        return events

    def close(self):
        pass


def test_the_engine_as_a_target():
    engine = FakeEngine()
    samples = perf.EngineTarget(engine).round([[1, 2], [3, 4]], 3)
    assert [sample.tokens for sample in samples] == [[1, 1, 1], [1, 1, 1]]
    assert all(sample.arrivals == sorted(sample.arrivals) for sample in samples)
    assert all(request.params.ignore_eos and request.params.greedy for request in engine.requests)
    assert [request.prompt_ids for request in engine.requests] == [[1, 2], [3, 4]]


def test_a_request_that_fails_ends_the_benchmark():
    with pytest.raises(OffroadError, match="error"):
        perf.EngineTarget(FakeEngine("error")).round([[1]], 2)


@pytest.fixture
def api():
    """A server target whose HTTP is answered in the process; `api.text` is the body of completions."""
    import httpx

    target = perf.ServerTarget.__new__(perf.ServerTarget)
    target.url, target.model, target.bodies, target.text = "http://test", "tiny", [], ""
    target.ids = False

    def handle(request):
        if request.url.path == "/plan":
            return httpx.Response(
                200, json={"fingerprint": "f9", "device": "Test", "dtype": "float32", "max_num_seqs": 4}
            )
        target.bodies.append(json.loads(request.content))
        return httpx.Response(200, text=target.text)

    target.client = httpx.Client(transport=httpx.MockTransport(handle))
    return target


def test_the_server_as_a_target(api):
    events = [
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [], "usage": {"completion_tokens": 5}},
    ]
    api.text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    samples = api.round([[1, 2], [3, 4]], 5)
    assert [sample.tokens for sample in samples] == [[1, 4], [1, 4]]  # the last piece carries what was held back
    assert sorted(body["prompt"] for body in api.bodies) == [[1, 2], [3, 4]]
    assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in api.bodies)
    assert api.facts()["plan_fingerprint"] == "f9"


@pytest.mark.parametrize(
    "text", ["data: [DONE]\n\n", 'data: {"error": {"message": "x"}}\n\n', 'data: {"choices": [{"text": "a"}]}\n\n']
)
def test_a_stream_without_text_or_usage_is_an_error(api, text):
    api.text = text
    with pytest.raises(OffroadError):
        api.round([[1]], 4)


def test_no_server_there():
    with pytest.raises(OffroadError, match="no answer"):
        perf.ServerTarget("http://127.0.0.1:9")


def test_engine_settings_and_an_address_do_not_go_together():
    with pytest.raises(SettingsError, match="max_num_seqs"):
        bench.open_target("http://127.0.0.1:9", {}, {"max_num_seqs": 3}, None)


def test_the_commit_of_this_checkout():
    found = perf.commit()
    assert found is None or len(found.removesuffix("+changes")) == 40
