"""Attention of a cut sequence to another one, whose length is its own."""

import numpy as np
import pytest
from mindspore import Tensor
from support.nightly import daily
from support.verified_calls import Sample, check_of, numbers

from mindformers_core.layout import layout
from mindformers_core.tensor_parallel.attention import attention


def crossed(algorithm):
    """Attention of each token to all of another text up to some place, by an algorithm."""
    known = None, (None, None), False, algorithm
    return lambda query, key, value, own, places: attention(query, key, value, own * 0, own + 3, places, 0.5, *known)


@pytest.mark.parametrize("algorithm", ["gather", "ring", "auto"])
@pytest.mark.parametrize("length", daily([4], [4, 16]))
def test_keys_of_another_length_than_queries(algorithm, length):
    keys = (numbers(4, length, 4, 4, low=-1) for _ in range(2))
    places = [np.arange(size, dtype=np.int32)[None] for size in (8, length)]
    cuts = [layout(None, "a")] * 5
    check_of(Sample("", crossed(algorithm), (numbers(4, 8, 4, 4, low=-1), *keys, *places), cuts=(cuts,)))


@pytest.mark.parametrize("cut", [None, "a"])
def test_an_order_of_keys_of_another_length_is_an_error(cut):
    """Neither queries nor keys lie at places that the order tells then; on one card, too."""
    tensors = [numbers(2, length, 4, 4) for length in (8, 16, 16)]
    places = [np.arange(length, dtype=np.int32)[None] for length in (8, 16)]

    def attend(query, key, value, own, places):
        return attention(query, key, value, own * 0, own + 1, places, 0.5, (0,))

    message = r"attention with order \(0,\) takes .* not query \(2, 8, 4, 4\) and key \(2, 16, 4, 4\): leave out order"
    with pytest.raises(ValueError, match=message):
        if cut is None:
            attend(*map(Tensor, (*tensors, *places)))
        check_of(Sample("", attend, (*tensors, *places), cuts=([layout(None, cut)] * 5,)))


def test_keys_that_ranks_do_not_divide():
    keys = (numbers(4, 7, 4, 4, low=-1) for _ in range(2))
    places = [np.arange(size, dtype=np.int32)[None] for size in (8, 7)]
    cuts = [layout(None, "a"), layout(), layout(), layout(None, "a"), layout()]
    with pytest.raises(ValueError, match=r"the 7 of key \(4, 7, 4, 4\) don't divide"):
        check_of(Sample("", crossed("gather"), (numbers(4, 8, 4, 4, low=-1), *keys, *places), cuts=(cuts,)))
