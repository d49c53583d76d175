"""An engine that says what the page shall show: thoughts, calls, code, tags; chosen by the last `!word` of a prompt.

And what tests do with the page."""

from __future__ import annotations

import json
import random
import re

import msgspec
from fake_engine import Info, Scripted
from fake_text import FakeText
from playwright.sync_api import Page, expect

from offroad.schedule.request import Request, SequenceState, Stats
from offroad.text.answer import Notation
from offroad.text.reasoning import THINK

MARKDOWN = """# Title

Some **bold** and *leaning* text with `code * here` and a_snake_name, 2 * 3 * 4.

- one
- two
  1. inner
  2. more
- three

1. first
2. second

> quoted **well**

| a | b |
|---|---|
| 1 | `x` |

```python
def f(x):
    return x < 2 and "**no bold**"
```

The end."""
EVIL = """<script>window.hurt = 1</script><img src=x onerror="window.hurt = 2">

**<b onmouseover=alert(1)>bold</b>** `<svg onload=alert(1)>` [link](javascript:alert(1)) ![i](http://evil.example/x.png)

```html" onclick="alert(1)
<script>window.hurt = 3</script>
```

| <script>window.hurt = 4</script> | b |
|---|---|
| <img src=x onerror=alert(1)> | 2 |
"""
CALL = (
    "Let me look.\n<tool_call>\n<function=search>\n<parameter=query>\na < b\n</parameter>\n"
    "<parameter=limit>\n7\n</parameter>\n</function>\n</tool_call>\n"
)
LONG = "".join(f"Paragraph {i} is about **something** and `code`.\n\n" for i in range(400))
TEXTS = [
    MARKDOWN,
    EVIL,
    "- a\n\n- b\n\n1. c\n\ntext\n```\nopen\n\n\nfence\n",
    "1. a\n```js\nx\n```\n2. b\n\n   more\n\n***\nx ** y * z ` w\n\n\n\n",
    "\n\n\na | b\n--|--\n1 | 2\nend\n# h\n> q\n> - r\n\n10) ten\n11) eleven\n* star\n",
    "**a *b* `c` d** *x***y** \\*no\\* ``a`b`` **open",
]
_MARKS = (
    "a|word |\n|\n\n|- |* |1. |2) |  |    |```|```js\n|~~~|`|``|**|*|> |¦|¦ a ¦ b ¦\n|¦---¦---¦\n|# |---\n|\\|<b>|é|\t"
)
_PIECES = [piece.replace("¦", "|") for piece in _MARKS.split("|")]
_CHANCE = random.Random(8)
TEXTS += ["".join(_CHANCE.choices(_PIECES, k=_CHANCE.randint(1, 60))) for _ in range(150)]
SAYS = {
    "hello": "Hello there, how can I help?",
    "think": "<think>\nLet me see: 6 * 7.\nThat is 42.\n</think>\n\nIt is **42**.",
    "md": MARKDOWN,
    "evil": EVIL,
    "call": CALL,
    "slow": "word " * 2000,
    "long": LONG,
    "first": "First answer.",
    "second": "Second answer.",
}
PLAN = {
    "model": "fake",
    "family": "fake",
    "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
    "block": 64,
    "k": 2,
    "chunk": 512,
    "depth": 2,
    "max_num_seqs": 16,
    "kv_bytes_per_token": 23040,
    "notes": ["context 512 of the model's 2048: what fits in memory"],
    "fingerprint": "f00d",
    "memory": {
        "total": 16 * 2**30,
        "budget": 12 * 2**30,
        "weights": 3 * 2**30,
        "kv": 5 * 2**30,
        "states": 2**29,
        "graphs": 2**28,
        "workspace": 2**28,
        "tables": 2**20,
        "headroom": 3 * 2**30 - 2**20,
        "history_blocks": 101,
    },
    "bound_tokens_per_second": {"decode": 81.5, "decode_all": 700.0, "prefill": 9000.0},
    "graphs": {"rows": [1, 2, 4], "widths": [1], "nbytes": 2**28, "reason": ""},
    "cells": [
        {
            "layers": layers,
            "op": op,
            "phase": phase,
            "kernel": kernel,
            "reason": "the fastest that the device can run",
            "layout": "triton.w4" if op.startswith("linear") else "",
            "sizes": {"n": 2048, "k": 1024},
            "features": [],
            "refused": {"cuda.mma": "needs mma_fp8, the device has mma_f16"} if op == "attention" else {},
        }
        for layers, op, phase, kernel in [
            ("model", "embed", "decode", "triton.embed"),
            ("0-2,4-6", "attention", "decode", "triton.paged"),
            ("0-2,4-6", "attention", "prefill", "triton.flash"),
            ("3,7", "gated_delta", "decode", "triton.delta"),
            ("0-7", "linear:qkv", "decode", "triton.linear"),
        ]
    ],
}


class PageText(FakeText):
    """Bytes as tokens, thoughts between tags, calls as Qwen 3 writes them."""

    def __init__(self) -> None:
        super().__init__({}, Notation(THINK, "qwen3_xml", frozenset({"tools", "enable_thinking"})))


class PageEngine(Scripted):
    pace, step_seconds = 5, 0.002

    def __init__(self, settings, progress) -> None:
        super().__init__(settings, progress)
        self.info = msgspec.structs.replace(
            Info(model=settings.model), plan_json=json.dumps(PLAN), max_model_len=200_000, device="a card"
        )

    def submit(self, request: Request) -> None:
        text = bytes(t for t in request.prompt_ids if t < 256).decode(errors="replace")
        word = (re.findall(r"!(\w+)", text) or ["hello"])[-1]
        # Where a tool has answered, its text comes last.
        self.says = "The tool said so." if text.endswith("found it") else SAYS.get(word, "Hello there, how can I help?")
        self.pace, self.step_seconds = {"slow": (1, 0.02), "long": (40, 0.001)}.get(word, (5, 0.002))
        super().submit(request)

    def sequences(self) -> list[SequenceState]:
        return [
            SequenceState(id, index, "decode", len(request.prompt_ids), 4, len(request.prompt_ids) + done, done)
            for (id, index), (request, _, done) in self.running.items()
        ]

    def _event(self, key, entry):
        event = super()._event(key, entry)
        self.generated += len(event.token_ids)
        return msgspec.structs.replace(event, cached=3, drafts=entry[2], accepted_drafts=entry[2] // 2)

    def stats(self) -> Stats:
        return msgspec.structs.replace(
            super().stats(), kv_blocks_used=30 if self.running else 0, kv_blocks_cached=20, draft_tokens=100,
            accepted_draft_tokens=60, prefix_query_tokens=8, prefill_tokens=self.prompted,
        )  # fmt: skip


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page):
    return page.locator("article.assistant")


def done(page: Page, count: int = 1) -> None:
    expect(page.locator("article.assistant[aria-busy=false]")).to_have_count(count)


def bodies(page: Page) -> list[dict]:
    """The bodies of the chats that the page sends from now on."""
    sent: list[dict] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.url.endswith("/v1/chat/completions") else None)
    return sent
