"""Prompt lookup and its settings."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offroad.errors import SettingsError
from offroad.settings import Settings
from offroad.speculate.config import Speculation, speculation
from offroad.speculate.ngram import propose


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_proposals_are_what_followed_the_longest_gram_last(tokens: list[int], count: int, shortest: int, more: int):
    longest = shortest + more
    expected: list[int] = []
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        starts = [i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[-size:]]
        if starts:
            expected = tokens[starts[-1] + size : starts[-1] + size + count]
            break
    assert propose(np.array(tokens), count, shortest, longest).tolist() == expected


def test_settings_as_in_vllm():
    assert speculation("") is None
    text = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 3, "prompt_lookup_max": 4}'
    assert speculation(text) == Speculation("ngram", 6, 3, 4)
    assert speculation('{"method": "ngram"}') == Speculation("ngram", 4, 2, 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "medusa"}, "method"),
        ({}, "method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_max"),
        ({"method": "ngram", "acceptance": "typical"}, "acceptance"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(values: dict, message: str):
    with pytest.raises(SettingsError, match=message):
        Settings.of(model="m", speculative_config=json.dumps(values))


def test_a_text_that_is_no_object():
    for text in ("ngram", "[1]"):
        with pytest.raises(SettingsError, match="a JSON object"):
            speculation(text)
