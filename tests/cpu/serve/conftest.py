"""Servers on a fake engine as fixtures."""

from __future__ import annotations

import pytest
from serve_stack import Stack, Wire


@pytest.fixture
def stack():
    return Stack


@pytest.fixture(scope="module")
def wire():
    running = Wire(Stack())
    yield running
    running.close()
