"""SmolLM2 quantised by `offroad quantize`: how much worse it predicts a text, and that transformers reads the files.

Run with -s to see the figures, and with OFFROAD_TEST_SCHEMES=all for the schemes that take too long for every change.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offroad import LLM
from offroad.evidence.quality import log_probabilities, quality
from offroad.quant.write import quantise
from offroad.settings import Settings
from offroad.weights.locate import open_source

MODEL = "smollm2-135m"
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
# Perplexity over that of the model that was quantised, at most. It is small, and was in 4 bits already (Q4_1, groups of
# 32), so that a second grid costs much; searching scales for the least squares made it no better.
MARGINS = {"w4a16-g128": 1.7, "fp8-block": 1.06, "nvfp4": 1.25, "mxfp4": 2.0}
SCHEMES = list(MARGINS) if os.environ.get("OFFROAD_TEST_SCHEMES") == "all" else ["w4a16-g128"]


def load(model: str) -> LLM:
    return LLM(model, device="cpu", max_num_seqs=1, max_model_len=1024)


@pytest.fixture(scope="module")
def original():
    llm = load(MODEL)
    yield llm
    llm.close()


@pytest.fixture(scope="module", params=SCHEMES)
def quantised(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised") / request.param
    quantise(open_source(Settings.of(model=MODEL)), folder, request.param, lambda fraction, note: None)
    llm = load(str(folder))
    yield request.param, folder, llm
    llm.close()


def test_perplexity_stays_within_the_margin(quantised, original):
    scheme, _, llm = quantised
    ids = original.tokenizer.encode(TEXT)[:1025]
    before = quality(original.engine, ids)
    after = quality(llm.engine, ids, baseline=original.engine)
    ratio = after.perplexity / before.perplexity
    print(f"\n{scheme}: perplexity {after.perplexity:.2f} against {before.perplexity:.2f} (x {ratio:.3f}), ", end="")
    print(f"divergence {after.divergence:.4f} nats a token, {after.tokens} tokens")
    assert ratio < MARGINS[scheme]


@torch.inference_mode()
def test_transformers_reads_what_is_written(quantised):
    from transformers import AutoModelForCausalLM

    scheme, folder, llm = quantised
    if scheme != "w4a16-g128":
        pytest.skip("transformers computes in this scheme on GPUs, or in another precision")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = llm.tokenizer.encode(TEXT)[200:264]
    ours = log_probabilities(llm.engine, ids)
    theirs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    difference = (ours - theirs).abs().max().item()
    print(f"\ntransformers on the quantised files: worst difference of log-probabilities {difference:.1e}")
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert difference < 1e-3
