"""Small models whose linears are 4-bit integers and whose every layer kind has an SM70 kernel: dummy weights."""

from __future__ import annotations

from typing import Any

from offroad.engine import Engine
from offroad.evidence.quality import log_probabilities
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request
from offroad.settings import Settings
from offroad.weights.dummy import DummySource

_COMMON = dict(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=300,
    max_position_embeddings=512,
    dtype="bfloat16",
)
_QWEN3_5 = _COMMON | dict(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    mamba_ssm_dtype="float32",
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    tie_word_embeddings=False,
    mtp_num_hidden_layers=0,
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
_MOE = {name: value for name, value in _QWEN3_5.items() if name != "intermediate_size"} | _EXPERTS
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=2, tie_word_embeddings=False,
        rope_theta=1e4, rms_norm_eps=1e-5,
    ),
    "qwen3_5": _QWEN3_5 | dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text"),
    "qwen3_5_moe": _MOE | dict(architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text"),
    "gemma4": _COMMON
    | dict(
        architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", num_hidden_layers=6, global_head_dim=64,
        num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=16, final_logit_softcapping=30.0,
        hidden_size_per_layer_input=0, tie_word_embeddings=True,
    ),
    "gemma4_e": _COMMON
    | dict(
        architectures=["Gemma4ForCausalLM"], model_type="gemma4_text", num_hidden_layers=10, global_head_dim=64,
        sliding_window=16, final_logit_softcapping=30.0, tie_word_embeddings=True, num_kv_shared_layers=5,
        use_double_wide_mlp=True, hidden_size_per_layer_input=32, vocab_size_per_layer_input=300,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
    ),
}  # fmt: skip
PROMPT = [5, 81, 130, 7, 7, 299, 44, 201, 63, 12, 90, 17, 250, 33, 8, 101, 77, 3, 160, 29, 211, 54, 6]
# Of log-probabilities, whose standard deviation is 1: that of activations in fp16, through a few layers, or half as
# much again as plain fp16 gives where a token of these random weights is worse off. One whose router nearly ties takes
# other experts.
LIMIT, TIED, MEAN, AGAIN = 0.08, 0.5, 0.01, 1.5


def engine_of(config: dict[str, Any], device: str, **settings: Any) -> Engine:
    """An engine on the same weights whatever the device: values are drawn on the CPU."""
    values = dict(max_model_len=256, max_num_seqs=3, max_num_batched_tokens=64) | settings
    made = Settings.of(model="dummy", device=device, **values)
    return Engine(made, source=DummySource(config, "cpu", "w4a16-g32"))


def answers(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of prompts that run together."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.submit(Request(id=str(i), prompt_ids=prompt, params=params))
    while engine.has_work():
        for event in engine.step():
            assert event.error is None, event.error
            found[event.request_id] += event.token_ids
    return list(found.values())


def rounded(config: dict[str, Any]) -> Engine:
    """Plain PyTorch in fp16 on the CPU."""
    linear = ["linear=torch.reference_linear"]
    return engine_of(config, "cpu", dtype="float16", max_num_batched_tokens=256, allow_reference=True, kernel=linear)


def compare(engine: Engine, reference: Engine, config: dict[str, Any], prompts: list[list[int]], count: int) -> None:
    """Greedy tokens are the reference's best ones, but for those as good within a limit; log-probabilities agree."""
    routed, plain = any("route" in cell.op for cell in engine.plan.cells), None
    for prompt, answer in zip(prompts, answers(engine, prompts, count), strict=True):
        assert len(answer) == count
        ids = [*prompt, *answer]
        wanted = log_probabilities(reference, ids)
        apart, limit = (log_probabilities(engine, ids).cpu() - wanted).abs(), TIED if routed else LIMIT
        if apart.max() >= limit:
            plain = plain or rounded(config)
            limit = AGAIN * (log_probabilities(plain, ids) - wanted).abs().max().item()
        assert apart.max() < limit, apart.max()
        assert apart.mean() < MEAN, apart.mean()
        after = wanted[len(prompt) - 1 : -1]
        taken = after.gather(1, wanted.new_tensor(answer).long()[:, None])[:, 0]
        assert (after.max(-1).values - taken).max() < limit, answer
