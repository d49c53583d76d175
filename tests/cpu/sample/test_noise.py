import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offroad.sample.noise import GUMBEL_MAX, bits_row, gumbel, gumbel_row, philox

WORD = st.integers(0, 2**32 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def plain_philox(counter, key):
    """Philox4x32-10 from its definition, on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def plain_bits(seed, position, token):
    seed, position = seed % 2**64, position % 2**64
    counter = (token // 4, position % 2**32, position >> 32, 0)
    return plain_philox(counter, (seed % 2**32, seed >> 32))[token % 4]


def plain_gumbel(seed, position, token):
    return -math.log(-math.log1p(-(plain_bits(seed, position, token) + 0.5) / 2**32))


@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.tuples(WORD, WORD))
def test_philox_agrees_with_its_definition(counter, key):
    words = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert [int(w) for w in words] == plain_philox(counter, key)


@settings(deadline=None)
@given(seed=INT64, position=st.integers(0, 2**40), tokens=st.lists(st.integers(0, 2**20), min_size=1, max_size=8))
def test_noise_is_a_function_of_seed_position_and_token(seed, position, tokens):
    expected = np.array([plain_gumbel(seed, position, t) for t in tokens], np.float32)
    rows = torch.tensor([seed, 1]), torch.tensor([position, 2])
    np.testing.assert_array_max_ulp(gumbel(*rows, torch.tensor(tokens))[0].numpy(), expected, 1)
    np.testing.assert_array_max_ulp(gumbel_row(seed, position, np.array(tokens)), expected, 1)


def test_a_vocabulary_holds_what_single_tokens_get():
    seed, position = torch.tensor([3, -4, 3]), torch.tensor([7, 7, 8])
    for vocab in (1, 4, 1001):
        whole = gumbel(seed, position, vocab)
        assert whole.shape == (3, vocab)
        some = torch.randint(0, vocab, (3, 50), generator=torch.Generator().manual_seed(0))
        assert torch.equal(whole.gather(1, some), gumbel(seed, position, some))
        assert torch.equal(whole[1:2], gumbel(seed[1:2], position[1:2], vocab))


def test_bits_of_a_row():
    bits = bits_row(-5, 9, 20_001)  # more than one chunk
    assert [int(b) for b in bits[[0, 1, 16_384, 20_000]]] == [plain_bits(-5, 9, t) for t in (0, 1, 16_384, 20_000)]


def test_distribution():
    noise = gumbel(torch.arange(20), torch.arange(20) + 5, 10_000).double().flatten()
    n = noise.numel()
    # Mean: Euler's constant; variance: pi**2 / 6. Five standard errors.
    assert abs(noise.mean() - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / n)
    assert abs(noise.var() - math.pi**2 / 6) < 5 * math.sqrt(4.4 * (math.pi**2 / 6) ** 2 / n)
    assert float(noise.max()) < GUMBEL_MAX
    uniform = torch.exp(-torch.exp(-noise))
    counts = torch.histc(uniform, 64, 0.0, 1.0)
    chi = ((counts - n / 64) ** 2 / (n / 64)).sum()
    assert chi < 63 + 5 * math.sqrt(2 * 63)


def test_the_largest_noise_is_bounded():
    assert -math.log(-math.log1p(-0.5 / 2**32)) < GUMBEL_MAX - 0.01
