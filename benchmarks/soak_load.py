"""What soak.py runs: small shapes of the models' kinds, and requests of all sorts."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offroad.sample.guide import Grammar, Guide
from offroad.sample.params import SamplingParams
from offroad.schedule.request import Request

END = 2  # the token that ends a guided answer
CONFIGS = Path(__file__).parent / "configs"
FEW_HEADS = dict(num_attention_heads=8, num_key_value_heads=2)
TINY = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
TINY_DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=16, vocab_size=300
)
# Names of --model: a config of benchmarks/configs, and what is smaller.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("qwen3-8b", TINY | dict(num_hidden_layers=3, vocab_size=300)),
    "tiny-hybrid": ("qwen3.5-27b", TINY | TINY_DELTA | dict(num_hidden_layers=4)),
    "hybrid": (
        "qwen3.5-27b",
        FEW_HEADS
        | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=8)
        | dict(linear_num_value_heads=32, tie_word_embeddings=True),
    ),
    "windows": (
        "gemma-4-31b",
        dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, num_attention_heads=8)
        | dict(num_key_value_heads=4, num_global_key_value_heads=1),
    ),
}


def config_of(model: str) -> dict[str, Any]:
    """The config of a name of SHAPES, or of a file."""
    name, changes = SHAPES.get(model, (None, {}))
    config = json.loads((CONFIGS / f"{name}.json" if name else Path(model)).read_text())
    config.get("text_config", config).update(changes)
    config["tie_word_embeddings"] = changes.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return config


@dataclass
class Load:
    """Makes requests: prompts of up to `longest` tokens, answers of up to `answer`. `shared`: prefixes that many have;
    `chats`: conversations as they stand, and in `marks` where their prompts ended."""

    dice: random.Random
    vocab: int
    longest: int
    answer: int
    guided: bool = False
    shared: list[list[int]] = field(default_factory=list)
    chats: list[list[int]] = field(default_factory=list)
    marks: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = [self.ids(int(self.longest * part)) for part in (0.1, 0.3, 0.5)]
        self.chats, self.marks = [[] for _ in range(6)], [() for _ in range(6)]

    def ids(self, count: int) -> list[int]:
        """Random ids, half of the time out of a few, so that prompt lookup has something to find."""
        few = [self.dice.randrange(3, self.vocab) for _ in range(7)]
        if self.dice.random() < 0.5:
            return [self.dice.choice(few) for _ in range(count)]
        return [self.dice.randrange(3, self.vocab) for _ in range(count)]

    def length(self, most: int) -> int:
        """16 to `most`, as many between n and 2 n for every n."""
        return int(math.exp(self.dice.uniform(math.log(16), math.log(max(17, most)))))

    def params(self, **fixed: Any) -> SamplingParams:
        """Sampling of any kind."""
        dice = self.dice
        few = {dice.randrange(3, self.vocab): 100.0 for _ in range(4)}
        kinds: list[dict[str, Any]] = [
            dict(temperature=0.0),
            dict(temperature=1.0),
            dict(temperature=0.7, top_p=0.9, top_k=40),
            dict(temperature=1.3, min_p=0.02),
            dict(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.3),
            dict(temperature=0.0, repetition_penalty=1.2),
            dict(temperature=1.0, logit_bias=few),
            dict(temperature=0.0, logit_bias=few),
            dict(temperature=1.0, top_k=1),
        ]
        values = dict(max_tokens=dice.choice((1, 8, 40, 120, 300)), logprobs=dice.choice((None, None, 0, 5)))
        values |= dict(ignore_eos=True, **dice.choice(kinds))
        return SamplingParams(**(values | fixed))

    def prompt(self) -> list[int]:
        """Fresh, or with a shared prefix."""
        before = self.dice.choice(([], [], *self.shared))
        return before + self.ids(self.length(self.longest - len(before)))

    def request(self, name: str) -> tuple[Request, int | None]:
        """A request, and the conversation that it goes on with."""
        dice, chat, marks = self.dice, None, ()
        if dice.random() < 0.3:
            chat = dice.randrange(len(self.chats))
            turn = self.ids(self.length(self.longest // 8))
            if len(self.chats[chat]) + len(turn) > self.longest:
                self.chats[chat], self.marks[chat] = [], ()
            ids = self.chats[chat] + turn
            self.chats[chat], self.marks[chat] = ids, (*self.marks[chat], len(ids))
            marks = self.marks[chat][-4:]
        else:
            ids = self.prompt()
        fixed: dict[str, Any] = {}
        if dice.random() < 0.25:  # short, with an answer that the room for keys may not last for
            chat, marks, ids, fixed["max_tokens"] = None, (), self.ids(self.length(64)), self.answer
        elif dice.random() < 0.05:
            fixed["n"] = dice.randint(2, 3)
        elif dice.random() < 0.05 and len(ids) < 600:
            fixed["prompt_logprobs"] = 1
        salt = "other" if dice.random() < 0.05 else ""
        made = self.made(name, ids, dice.random() < 0.07, marks=marks, salt=salt, **fixed)
        return made, chat

    def made(
        self, name: str, ids: list[int], guided: bool, marks: tuple[int, ...], salt: str = "", **fixed: Any
    ) -> Request:
        """A request with sampling of any kind; a guided one says digits, and ends when it likes."""
        guide = Guide(Grammar("regex", "[0-9]+")) if guided and self.guided else None
        fixed |= {} if guide is None else {"ignore_eos": False}
        params, seed = self.params(**fixed), self.dice.randrange(2**31)
        return Request(
            id=name, prompt_ids=ids, params=params, seed=seed, eos_ids=(END,), marks=marks, salt=salt, guide=guide
        )


def marked_requests(load: Load, count: int) -> list[Request]:
    """Requests of all lengths, every other one with a shared prefix; what they ask for is fixed."""
    made: list[Request] = []
    for i in range(count):
        own = load.ids(max(1, int(16 * (load.longest / 32) ** (i / max(1, count - 1)))))
        ids = load.shared[i % 3] + own if i % 2 else own
        fixed = dict(max_tokens=load.dice.randint(24, 96), logprobs=3)
        made.append(load.made(f"alone-{i}", ids, i % 7 == 3, (len(ids),), **fixed))
    return made
