"""What the routes of one server share: the engine's client, the text layer, metrics, the served name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from offroad.execute.client import EngineClient
from offroad.execute.restart import keep_running
from offroad.sample.guide import Guide
from offroad.sample.params import SamplingParams
from offroad.serve.generation import Generation
from offroad.serve.logs import note
from offroad.serve.metrics import Metrics
from offroad.serve.record import Record
from offroad.serve.security import Keys
from offroad.serve.text import Prompt, TextLayer, model_text
from offroad.settings import Settings
from offroad.weights.source import TokenizerFiles

MakeText = Callable[[TokenizerFiles, Settings], TextLayer]


class Service:
    """One served model. It can answer from the moment that `start` has returned.

    Raises SettingsError for keys or a record that cannot be had.
    """

    def __init__(self, settings: Settings, client: EngineClient, make_text: MakeText = model_text) -> None:
        self.settings, self.client = settings, client
        self.metrics = Metrics(client)
        self.names, self.keys = settings.names, Keys.of(settings)
        self.name = self.names[0]
        self.record = Record.of(settings, self.keys)
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
        """Loads the engine and then the text layer, which stays when the engine is started again.

        Raises the OffroadError of either.
        """
        await self.client.start(progress)
        if self._text is None:
            self._text = await asyncio.to_thread(self._make_text, self.client.tokenizer, self.settings)
        self.client.open()

    async def watch(self) -> None:
        """Starts an engine that has ended again, if the settings say so; cancel it before the end."""
        if self.settings.restart_engine:
            await keep_running(self.client, self.start)

    async def close(self) -> None:
        """Ends the engine and the record. May be called again."""
        await self.client.close()
        if self.record is not None:
            self.record.close()

    def generation(self, prompts: list[Prompt], params: list[SamplingParams], **more: Any) -> Generation:
        """Submits prompts. Raises NotReady, EngineDead or QueueFull."""
        guide: Guide | None = more.get("guide")
        if guide is not None and guide.grammar is not None:
            self.client.teach(self.text.vocabulary(), self.text.eos_ids)
        timeout = self.settings.request_timeout
        generation = Generation(self.client, self.text, self.metrics, prompts, params, timeout=timeout, **more)
        note(generation)
        return generation

    def card(self, name: str | None = None) -> dict[str, Any]:
        """The model as /v1/models lists it under a name; `max_model_len` is null until the engine is loaded."""
        info = self.client.info
        return {
            "id": name or self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "offroad",
            "root": self.settings.model,
            "max_model_len": info.max_model_len if info else None,
        }
