import numpy as np
import torch

from offroad.sample.logprobs import logprobs
from offroad.sample.params import MAX_LOGPROBS


def test_values_and_order():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)) * 4
    chosen = torch.tensor([5, 199, 0])
    out = logprobs(logits, chosen)
    x = logits.double().numpy()
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    np.testing.assert_allclose(out.chosen, expected[np.arange(3), chosen.numpy()], atol=1e-5)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.top_ids, order)
    np.testing.assert_allclose(out.top, np.take_along_axis(expected, order, -1), atol=1e-5)


def test_equal_logits_come_in_the_order_of_ids():
    logits = torch.zeros(1, 500, dtype=torch.bfloat16)
    logits[0, ::2] = -0.0
    logits[0, 300], logits[0, 7] = 1.0, -1.0
    out = logprobs(logits, torch.tensor([7]))
    assert out.top_ids[0].tolist() == [300, *[i for i in range(21) if i != 7][:19]]
    assert out.top_ids.dtype == np.int64


def test_rows_do_not_depend_on_their_mates():
    logits = torch.randn(6, 333, generator=torch.Generator().manual_seed(1))
    chosen = torch.arange(6)
    whole = logprobs(logits, chosen)
    for i in range(6):
        one = logprobs(logits[i : i + 1], chosen[i : i + 1])
        assert one.chosen[0] == whole.chosen[i]
        assert (one.top[0] == whole.top[i]).all()
        assert (one.top_ids[0] == whole.top_ids[i]).all()


def test_a_small_vocabulary_is_padded():
    out = logprobs(torch.zeros(1, 4), torch.tensor([2]))
    np.testing.assert_allclose(out.top[0, :4], np.log(0.25), rtol=1e-6)
    assert np.isneginf(out.top[0, 4:]).all()
