"""What the routes of one server share: the engine's client, the text layer, metrics, the served name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from offroad.execute.client import EngineClient
from offroad.sample.guide import Guide
from offroad.sample.params import SamplingParams
from offroad.serve.generation import Generation
from offroad.serve.metrics import Metrics
from offroad.serve.text import Prompt, TextLayer, model_text
from offroad.settings import Settings
from offroad.weights.source import TokenizerFiles

MakeText = Callable[[TokenizerFiles, Settings], TextLayer]


class Service:
    """One served model. It can answer from the moment that `start` has returned."""

    def __init__(self, settings: Settings, client: EngineClient, make_text: MakeText = model_text) -> None:
        self.settings, self.client = settings, client
        self.metrics = Metrics(client)
        self.name = settings.served_model_name or settings.model
        self.created = int(time.time())
        self.template_defaults = settings.template_defaults()
        self._make_text = make_text
        self._text: TextLayer | None = None

    @property
    def text(self) -> TextLayer:
        """The text layer; only once `ready`."""
        assert self._text is not None
        return self._text

    @property
    def status(self) -> str:
        """As `/health` tells it: "ready", "loading", "draining" or "dead"."""
        return self.client.state.value

    async def start(self, progress: Callable[[str, float, str], None] | None = None) -> None:
        """Loads the engine and then the text layer. Raises the OffroadError of either."""
        await self.client.start(progress)
        self._text = await asyncio.to_thread(self._make_text, self.client.tokenizer, self.settings)
        self.client.open()

    def generation(self, prompts: list[Prompt], params: list[SamplingParams], **more: Any) -> Generation:
        """Submits prompts. Raises NotReady, EngineDead or QueueFull."""
        guide: Guide | None = more.get("guide")
        if guide is not None and guide.grammar is not None:
            self.client.teach(self.text.vocabulary(), self.text.eos_ids)
        return Generation(self.client, self.text, self.metrics, prompts, params, **more)

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it; `max_model_len` is null until the engine is loaded."""
        info = self.client.info
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "offroad",
            "root": self.settings.model,
            "max_model_len": info.max_model_len if info else None,
        }
