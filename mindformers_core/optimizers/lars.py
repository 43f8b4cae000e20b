"""LARS (You et al., "Large Batch Training of Convolutional Networks", 2017) of parameters in slices on a mesh."""

import mindspore as ms
from mindspore import ops

from mindformers_core.optimizers.sgd import SGD
from mindformers_core.tensor_parallel.clipping import sums_over_parts


class LARS(SGD):
    """`SGD` with a step scaled to the norm of each weight: shards are updated as the whole would be.

    Gradient and decay are multiplied by `trust * norm(weight) / (norm(gradient) + weight_decay * norm(weight))`, or 1
    where a norm is 0. The rate is outside of the moment, as in `SGD`; in the paper it is inside, which differs where it
    changes. Norms are taken in float32 over the mesh axes that shard a parameter: one all-reduce for each set of axes.

    Args:
        parameters: the trainable parameters.
        trust: as above.
        momentum, weight_decay: as of `SGD`.
    """

    def __init__(self, parameters, momentum=0.9, trust=0.001, weight_decay=0.0):
        super().__init__(parameters, momentum, weight_decay=weight_decay)
        self.trust = trust
        self.places, self.sums = sums_over_parts(parameters, range(len(parameters)))

    def factors(self, gradients):
        found = [None] * len(gradients)
        for index, places in enumerate(self.places):
            squares = ()
            for place in places:
                for tensor in (self.parameters[place], gradients[place]):
                    squares = squares + (ops.square(ops.cast(tensor, ms.float32)).sum(),)
            norms = ops.sqrt(self.sums[index](ops.stack(squares)))
            weights, others = norms[::2], norms[1::2]
            both = ops.logical_and(weights > 0, others > 0)
            ratios = self.trust * weights / (others + self.weight_decay * weights)
            ratios = ops.select(both, ratios, ops.ones_like(weights))
            for number, place in enumerate(places):
                found[place] = ratios[number]
        return found
