"""Attention over a cut sequence: parts of keys and values go round in a ring, or lie where they are.

The outputs of parts of the keys are averaged by the sums of their exponentials (Liu, Zaharia, Abbeel, "Ring Attention
with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889).
"""

from mindspore import ops


def ring(operator, args, context):
    """Parts of keys go round: each rank merges what its queries see in all of them."""
    query, key, value, first, last, places, *known = args
    parts = [operator(query, key, value, first, last, places, *known)]
    known = (known[0], None, *known[2:])
    for distance in range(1, context.count):
        passed = (context.shift(each, distance) for each in (key, value, places))
        parts.append(operator(query, *[next(passed) for _ in range(2)], first, last, *passed, *known))
    outputs, sums = zip(*parts)
    top = sums[0]
    for each in sums[1:]:
        top = ops.maximum(top, each)
    top = ops.stop_gradient(top)
    return _merged(outputs, [ops.exp(each - top) for each in sums], top, lambda terms: sum(terms[1:], terms[0]))


def merge(operator, args, context):
    """Each rank has a part of the keys, and all queries."""
    output, sums = operator(*args[:7], None, *args[8:])
    top = context.combined(ops.stop_gradient(sums), "max")
    return _merged((output,), [ops.exp(sums - top)], top, lambda terms: context.combined(terms[0]))


def _merged(outputs, weights, top, total):
    """The average of outputs of parts by weights (batch, heads, length), and the logarithm of all parts' sums."""
    wide = [ops.expand_dims(ops.transpose(each, (0, 2, 1)), 3) for each in weights]
    sums = total(weights)
    scaled = total([ops.cast(output, weight.dtype) * weight for output, weight in zip(outputs, wide)])
    output = scaled / ops.expand_dims(ops.transpose(sums, (0, 2, 1)), 3)
    return ops.cast(output, outputs[0].dtype), ops.log(sums) + top
