"""Tiny random checkpoints of every family, written by transformers; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tiny_models import write_tiny

settings.register_profile("more", max_examples=500)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    """`tiny(family)` -> (folder, transformers' model)."""

    @cache
    def make(family: str) -> tuple[Path, torch.nn.Module]:
        folder = tmp_path_factory.mktemp(family)
        return folder, write_tiny(family, folder)

    return make
