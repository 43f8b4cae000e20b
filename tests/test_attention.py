"""Attention of queries to keys in ranges of places, against dense attention, and cut along every dim."""

import numpy as np
from mindspore import Tensor
from support.verified_calls import numbers

from mindformers_core.tensor_parallel.attention import attention

QUERY, KEY, VALUE = numbers(2, 8, 4, 4, low=-1), numbers(2, 8, 2, 4, low=-1), numbers(2, 8, 2, 6, low=-1)
PLACES = np.arange(8, dtype=np.int32)[None]


def dense(query, key, value, first, last, places, scale):
    """What NumPy gives."""
    copies = query.shape[2] // key.shape[2]
    key, value = (np.repeat(each, copies, 2) for each in (key, value))
    scores = np.einsum("bshd,bthd->bhst", query, key) * scale
    seen = (places[:, None] >= first[..., None]) & (places[:, None] < last[..., None])
    weights = np.where(seen[:, None], np.exp(scores), 0)
    total = weights.sum(-1)
    return np.einsum("bhst,bthd->bshd", weights / np.where(total, total, 1)[..., None], value), total


def test_ranges_of_places():
    """A causal mask, and rows that see nothing."""
    first, last = np.zeros((1, 8), np.int32), PLACES + 1
    last = last * (PLACES != 3)
    given = QUERY, KEY, VALUE, first, last, PLACES
    output, sums = attention(*map(Tensor, given), 0.5)
    wanted, total = dense(*given, 0.5)
    np.testing.assert_allclose(output.asnumpy(), wanted, rtol=1e-5, atol=1e-6)
    seen = np.broadcast_to(total > 0, sums.shape)
    np.testing.assert_allclose(sums.asnumpy()[seen], np.log(total[total > 0]), rtol=1e-5, atol=1e-6)
    assert not output.asnumpy()[:, 3].any() and (sums.asnumpy()[~seen] < -1e38).all()
