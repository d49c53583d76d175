"""Bytes of hybrid models: what grows with each token, what each sequence and each checkpoint takes, and the weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from real_specs import CONFIGS, headers_of, qwen3_5

from offroad.device.profile import DeviceProfile, load_profile
from offroad.models.registry import resolve_model
from offroad.models.spec import AttentionSpec, ModelSpec
from offroad.ops.budget import Dtypes, checkpoint_bytes, kv_bytes_per_token, state_bytes
from offroad.ops.cells import Cell
from offroad.ops.plan import Plan, plan
from offroad.ops.registry import default_registry
from offroad.settings import Settings

GIB = 1024**3
BF16 = Dtypes("bfloat16", "bfloat16")
SMALL = dict(linear_num_value_heads=16, num_key_value_heads=2, num_attention_heads=8)
MIDDLE = dict(linear_num_value_heads=32, num_attention_heads=16, num_hidden_layers=32)
MODELS = CONFIGS | {
    "qwen3_5-0.8b": qwen3_5(tied=True, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, **SMALL),
    "qwen3_5-4b": qwen3_5(tied=True, hidden_size=2560, intermediate_size=9216, **MIDDLE),
    "qwen3_5-9b": qwen3_5(hidden_size=4096, intermediate_size=12288, **MIDDLE),
    "qwen3_5-27b, states in bf16": qwen3_5(mamba_ssm_dtype="bfloat16"),
}


@dataclass(frozen=True)
class Figures:
    """What there is of layers and heads, and the bytes that follow, in bf16: `state` of a checkpoint, with 3 columns;
    a slot has one more."""

    delta_layers: int
    full_layers: int
    kv_heads: int
    value_heads: int
    kv: int
    state: int
    state_size: int = 4

    @property
    def column(self) -> int:
        """Bytes of a column of q and k of 16 heads and of v, in all layers."""
        return self.delta_layers * (2 * 16 + self.value_heads) * 128 * 2

    @property
    def slot(self) -> int:
        return self.state + self.column


FIGURES = {
    "qwen3_5-0.8b": Figures(18, 6, 2, 16, kv=12_288, state=19_537_920),
    "qwen3_5-4b": Figures(24, 8, 4, 32, kv=32_768, state=51_511_296),
    "qwen3_5-9b": Figures(24, 8, 4, 32, kv=32_768, state=51_511_296),
    "qwen3_5-27b": Figures(48, 16, 4, 48, kv=65_536, state=153_944_064),
    "qwen3_5-27b, states in bf16": Figures(48, 16, 4, 48, kv=65_536, state=78_446_592, state_size=2),
    "qwen3_5-35b-a3b": Figures(30, 10, 2, 32, kv=20_480, state=64_389_120),
}


def spec_of(name: str) -> ModelSpec:
    return resolve_model(MODELS[name]).spec


def make(name: str, memory: int = 160 * GIB, **settings) -> Plan:
    spec, device = spec_of(name), DeviceProfile("cpu-test", "cpu", memory, frozenset(), units=2, source="probe")
    chosen = Settings.of(model=name, dtype="bfloat16", kv_cache_memory_bytes=8 * GIB, **settings)
    return plan(name, spec, headers_of(spec), device, chosen, default_registry(), "bfloat16")


@pytest.mark.parametrize("name", FIGURES)
def test_bytes_of_a_token_and_of_a_state(name: str):
    """A token: keys and values of 256 in each full layer. A state: 128 by 128 a value head, and 3 columns of q and k of
    16 heads and of v."""
    spec, of = spec_of(name), FIGURES[name]
    kinds = [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
    assert (kinds.count(False), kinds.count(True)) == (of.delta_layers, of.full_layers)
    assert kv_bytes_per_token(spec, BF16) == of.kv == of.full_layers * 2 * of.kv_heads * 256 * 2

    def state(rows_of_s: int, columns: int) -> int:
        return of.delta_layers * rows_of_s * of.value_heads * 128 * 128 * of.state_size + columns * of.column

    assert checkpoint_bytes(spec, BF16) == of.state == state(1, 3)
    assert state_bytes(spec, BF16, 0) == of.slot == state(1, 4)  # a column is written before the oldest is read
    assert state_bytes(spec, BF16, 3) == state(4, 7)  # with room for three drafts


@pytest.mark.parametrize("name", ["qwen3_5-0.8b", "qwen3_5-27b", "qwen3_5-35b-a3b"])
def test_a_plan_says_what_its_cache_takes(name: str):
    made, of = make(name, max_num_seqs=4), FIGURES[name]
    assert (made.kv_bytes_per_token, made.state_bytes) == (of.kv, of.slot)
    lines = made.explain().splitlines()
    [cache] = [line for line in lines if line.startswith("kv cache")]
    assert cache.split(maxsplit=2)[2] == (
        f"{of.kv:,} B a token growing, 0 B of windows and {of.slot:,} B of state a sequence"
    )
    [memory] = [line for line in lines if line.startswith("memory")]
    assert f"slots 5 x {of.slot / 1024:.0f} KiB" in memory
    assert f"checkpoints {made.memory.checkpoints} x {of.state / 1024:.0f} KiB" in memory
    assert f"history {of.kv * 64 // 1024} KiB x {made.memory.history_blocks} blocks" in memory
    assert made.to_json()["state_bytes"] == of.slot
    assert "note            text only: the vision tower is not loaded" in lines


def test_memory_is_divided_among_slots_checkpoints_and_history():
    made = make("qwen3_5-27b", max_num_seqs=4)
    memory = made.memory
    assert 0 < memory.checkpoints <= 16
    assert memory.states == 5 * FIGURES["qwen3_5-27b"].slot + memory.checkpoints * 153_944_064
    assert memory.kv == memory.history_blocks * 64 * 65_536
    assert memory.kv + memory.checkpoints * memory.checkpoint_bytes <= 8 * GIB
    assert memory.used <= memory.budget
    assert make("qwen3_5-27b", max_num_seqs=4, enable_prefix_caching=False).memory.checkpoints == 0
    named = make("qwen3_5-27b", max_num_seqs=4, checkpoint_memory_bytes=3 * 153_944_064 + 5).memory
    assert named.checkpoints == 3
    assert named.history_blocks >= memory.history_blocks


@pytest.mark.parametrize("sequences", [1, 16, 40])
def test_a_plan_that_fills_a_gpu_stays_within_its_budget(sequences: int):
    """Weights of 50 GiB leave little: states come first, a bounded part goes to checkpoints, and all is counted."""
    spec, device = spec_of("qwen3_5-27b"), load_profile("h100-80gb")
    settings = Settings.of(model="m", allow_reference=True, max_num_seqs=sequences)
    made = plan("m", spec, headers_of(spec), device, settings, default_registry(), "bfloat16")
    memory = made.memory
    assert memory.slots == sequences + 1
    assert 0 <= memory.headroom < GIB
    room = memory.kv + memory.checkpoints * memory.checkpoint_bytes
    assert memory.checkpoints * memory.checkpoint_bytes <= room / 8 + memory.history_block_bytes
    assert 256 <= made.max_len <= (memory.history_blocks - 1) * 64
    assert any("what fits in memory" in note for note in made.notes) == (made.max_len < 262144)


def test_weights_of_27b():
    """Linears in bf16, norms and other small tensors in fp32, no drafter: counted by the dimensions of the model."""
    h, ff, vocab = 5120, 17408, 248320
    mlp = 3 * h * ff
    delta = (10240 + 6144 + 48 + 48) * h + 6144 * h
    full = (2 * 24 + 4 + 4) * 256 * h + 24 * 256 * h
    small = 48 * (10240 * 4 + 48 + 48 + 128) + 16 * 2 * 256 + 64 * 2 * h + h
    assert make("qwen3_5-27b").memory.weights == 2 * (2 * vocab * h + 64 * mlp + 48 * delta + 16 * full) + 4 * small


def test_weights_of_35b_a3b():
    h, vocab = 2048, 248320
    experts, shared = 256 * 3 * 512 * h + 256 * h, 3 * 512 * h + h
    delta = (8192 + 4096 + 32 + 32) * h + 4096 * h
    full = (2 * 16 + 2 + 2) * 256 * h + 16 * 256 * h
    small = 30 * (8192 * 4 + 32 + 32 + 128) + 10 * 2 * 256 + 40 * 2 * h + h
    linears = 2 * vocab * h + 40 * (experts + shared) + 30 * delta + 10 * full
    assert make("qwen3_5-35b-a3b").memory.weights == 2 * linears + 4 * small


@pytest.mark.parametrize(("sequences", "store"), [(3, "rows"), (4, "replay")])
def test_states_are_kept_once_where_rows_for_drafts_would_take_too_much(sequences: int, store: str):
    """27B with 3 drafts: a state is 144 MiB, so that rows of 4 slots take 1.7 GiB and of 5 slots 2.1 GiB; 1/32 of a
    budget of 64 GiB is 2 GiB. Records are a key a key head, a delta and a decay a value head: 1.5 MiB a token."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    device = DeviceProfile("cpu-test", "cpu", 640 * GIB // 9, frozenset(), units=2, source="probe")
    spec = spec_of("qwen3_5-27b")
    settings = dict(max_num_seqs=sequences, speculative_config=drafts, memory_utilization=0.9)
    chosen = Settings.of(model="m", dtype="bfloat16", kv_cache_memory_bytes=GIB, max_model_len=512, **settings)
    made = plan("m", spec, headers_of(spec), device, chosen, default_registry(), "bfloat16")
    matrix, columns, record = 48 * 128 * 128 * 4, 7 * 80 * 128 * 2, 4 * (16 * 128 + 48 * 128 + 48)
    each = (4 * matrix if store == "rows" else matrix + 8 * record) + columns
    assert (made.store, made.memory.slot_bytes) == (store, 48 * each)
    assert made.memory.checkpoint_bytes == FIGURES["qwen3_5-27b"].state
    assert ("one is kept and tokens are replayed" in made.explain()) == (store == "replay")
    assert made.to_json()["store"] == store


@pytest.mark.parametrize("reference", [True, False])
def test_rows_are_kept_where_no_kernel_replays(reference: bool):
    """On a GPU whose kernel of Gated DeltaNet keeps rows only, that one is taken, and the plan says why."""
    spec, drafts = spec_of("qwen3_5-4b"), '{"method": "ngram"}'
    sizes = dict(max_num_seqs=32, max_model_len=512)
    settings = Settings.of(model="m", speculative_config=drafts, allow_reference=reference, **sizes)
    made = plan("m", spec, headers_of(spec), load_profile("v100-32gb"), settings, default_registry(), "bfloat16")
    assert (made.store, made.lag, made.cells[Cell(0, "gated_delta", "decode")].kernel) == (
        "rows",
        0,
        "cuda.sm70_gated_delta",
    )
    assert "recurrent states: a row a token, since no kernel of" in made.explain()


@pytest.mark.parametrize("drafts", [0, 3, 12])
def test_a_gpu_writes_states_at_every_few_tokens(drafts: int):
    """One state and records: of 8 tokens behind it, or of a step's if these are more, and of the step that runs."""
    spec = spec_of("qwen3_5-27b")
    speculation = f'{{"method": "ngram", "num_speculative_tokens": {drafts}}}' if drafts else ""
    settings = dict(max_num_seqs=4, max_model_len=512, speculative_config=speculation, allow_reference=True)

    def made(**more) -> Plan:
        chosen = Settings.of(model="m", **settings, **more)
        return plan("m", spec, headers_of(spec), load_profile("h100-80gb"), chosen, default_registry(), "bfloat16")

    matrix, columns, record = 48 * 128 * 128 * 4, (4 + drafts) * 80 * 128 * 2, 4 * (16 * 128 + 48 * 128 + 48)
    lag = max(8, drafts + 1)
    found = made()
    assert (found.store, found.lag) == ("replay", lag)
    assert found.memory.slot_bytes == 48 * (matrix + columns + (lag + drafts + 1) * record)
    assert f"recurrent states: read at every step, written when more than {lag} records" in found.explain()
    assert made(batch_invariant=True).store == "rows"


@pytest.mark.parametrize(("invariant", "states"), [(True, 2), (False, 1 + 1 / 8)])
def test_what_a_token_moves_of_states(invariant: bool, states: float):
    """Rows are read and written; a replayed state is read, and written at every eighth token, with four records of
    eight read on average and one written. Three columns are read and one is written."""
    spec, settings = spec_of("qwen3_5-27b"), dict(max_num_seqs=4, max_model_len=512, allow_reference=True)
    h100 = load_profile("h100-80gb")

    chosen = Settings.of(model="m", batch_invariant=invariant, **settings)
    made = plan("m", spec, headers_of(spec), h100, chosen, default_registry(), "bfloat16")
    matrix, columns, record = 48 * 128 * 128 * 4, 4 * 80 * 128 * 2, 4 * (16 * 128 + 48 * 128 + 48)
    each = 48 * (states * matrix + columns + (0 if invariant else 5 * record)) + 1024 * 65_536
    shared = made.memory.weights - 2 * 248_320 * 5120  # the input embedding is not read
    assert made.bound is not None
    # Norms and other tensors of few bytes are not counted there.
    assert made.bound.decode_all == pytest.approx(4 * h100.bandwidth / (shared + 4 * each), rel=2e-3)
