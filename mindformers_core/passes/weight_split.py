"""The backward pass in two parts, for zero-bubble schedules: gradients of inputs first, gradients of weights later.

`split_weight_gradients(cell)` has the programs of a sharded Cell written anew: a matmul whose weight is a trained
parameter gives its input's gradient in the backward pass, and leaves what the weight's gradient is computed from, the
pair (input, gradient of the output). That gradient is one matmul of the pair, which anybody may compute at any later
time; the idea is from "Zero Bubble Pipeline Parallelism" (Qi et al., 2023). Biases, norms and embeddings are cheap, and
keep their ordinary gradient.

How the pairs get out: in PyNative the operator's backward keeps them in a list. A compiled graph has no side effects;
there each operator takes two tiny Parameters besides, its *collectors*, and says that the pair is their gradient.

    deferred = split_weight_gradients(shard(stage, mesh))
    …  # forward calls of any number of micro-batches
    weights = (*deferred.ordinary_parameters, *deferred.collectors)
    gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(stage, ParameterTuple(weights))
    of_inputs, of_weights = gradient(*inputs, sens)  # of one micro-batch, in any order
    pending = deferred.take(of_weights[len(deferred.ordinary_parameters) :])
    …  # much later
    for parameter, part in deferred.weight_gradients(pending): …  # to be added to its ordinary gradient, if it has one
"""

from dataclasses import dataclass

from mindspore import Parameter, Tensor, _Function, nn, ops
from mindspore import dtype as mstype
from mindspore.graph.api import _no_grad

from mindformers_core.communication import communicator
from mindformers_core.program.deferral import PRODUCTS, DeferredWeight, deferred_weights
from mindformers_core.sharding.sharded_cells import computing_parameters, tree_of_root

__all__ = ["DeferredGradients", "PendingGradients", "split_weight_gradients"]

_WEIGHT_GRADIENT = ops.MatMul(transpose_a=True)


def split_weight_gradients(cell):
    """Until `pause()` of the result, backward passes through `cell` leave the gradients of its weights for later.

    Plain `mindspore.jit` doesn't compile anew for that; `jit` of this package does. Operators
    that are deferred: matmuls and dense layers `x @ weight`, `weight` of two dims, transposed or not, of any inputs;
    a weight that several use, or that is used otherwise, too, has the sum of what each gives.

    Args:
        cell: the root of a tree that `shard()` made, in its generated mode; on one card, shard it over a mesh of one.

    Returns:
        The `DeferredGradients`, the same one at every call.

    Raises:
        TypeError: `cell` isn't sharded. ValueError: it isn't the root of its tree, or runs operator by operator.
    """
    tree = tree_of_root(cell, "split_weight_gradients")
    if tree.deferred_gradients is None:
        tree.deferred_gradients = DeferredGradients(tree)
    tree.deferring = True
    return tree.deferred_gradients


@dataclass(frozen=True, eq=False)
class PendingGradients:
    """What the weight gradients of one backward pass are computed from.

    Attributes:
        pairs: (`DeferredProduct`, input (rows, in), gradient of the output (rows, out)) of every deferred operator.
    """

    pairs: tuple


class DeferredGradients:
    """The weight gradients that a sharded tree leaves for later. All tensors are this rank's parts.

    What there is grows when a program for new shapes is made, at the first forward call with them or by `prepare()`:
    ask for `collectors` and parameters after that. Programs share collectors where they can.
    """

    def __init__(self, tree):
        self._tree = tree
        self._products = {}  # (DeferredWeight, how many alike came before in the program) -> DeferredProduct
        self._ordinary = set()

    @property
    def parameters(self):
        """The Parameters of whose gradient at least a part is deferred: a tuple."""
        found = {id(product.parameter): product.parameter for product in self._products.values()}
        return tuple(found.values())

    @property
    def ordinary_parameters(self):
        """The trained Parameters whose gradient, or a part of it, the backward pass gives as ever: a tuple.

        The others needn't be among the weights of `GradOperation`: for them it gives zeros.
        """
        whole = {id(parameter) for parameter in self.parameters} - self._ordinary
        return tuple(p for p in computing_parameters(self._tree.cells[""]) if p.requires_grad and id(p) not in whole)

    @property
    def collectors(self):
        """Parameters to be put last among the weights of `GradOperation`, in PyNative, too: a tuple.

        A product whose collectors aren't among them is left out of the backward pass where it isn't on the way to any
        other gradient. No optimizer or checkpoint sees them.
        """
        return tuple(collector for product in self._products.values() for collector in product.collectors)

    def pause(self):
        """From now on, until the Cell is split again, its backward passes give all gradients, as ever."""
        self._tree.deferring = False

    def take(self, collector_gradients=()):
        """What the backward pass that has just run leaves for later. To be called once after each.

        Args:
            collector_gradients: the gradients of `collectors`, in their order; may be left out in PyNative.

        Returns:
            A `PendingGradients`, which keeps its tensors alive: for `weight_gradients`.

        Raises:
            ValueError: gradients of another number of collectors than there are; or nothing has arrived.
        """
        products = self._products.values()
        pairs = [(product, *pair) for product in products for pair in product.arrived]
        for product in products:
            product.arrived.clear()
        if collector_gradients:
            if len(collector_gradients) != 2 * len(products):
                raise ValueError(
                    f"{self._tree.label('')} has {2 * len(products)} collectors, and take() got the gradients of "
                    f"{len(collector_gradients)}: there are more after a forward call with new shapes, so ask for "
                    "`collectors` again and make GradOperation anew"
                )
            given = iter(collector_gradients)
            # else of another program, or of a Cell that isn't compiled: it has arrived
            pairs += [pair for pair in zip(products, given, given) if pair[1].ndim > 1]
        if not pairs and self._products:
            raise ValueError(
                f"{self._tree.label('')}: no gradient has arrived for later. Call take() after a backward pass, and in "
                "a compiled one give it the gradients of `collectors`, the last weights of GradOperation"
            )
        return PendingGradients(tuple(pairs))

    def weight_gradients(self, pending):
        """The gradients that a backward pass left for later: one matmul for every deferred operator.

        They go back the way that the weight came, so on a mesh they may communicate: ranks must agree on the order of
        their calls. Runs in PyNative.

        Args:
            pending: what `take` gave.

        Returns:
            Pairs (Parameter, its gradient or the deferred part of that), each Parameter once.
        """
        sums, totals = {}, {}
        with _no_grad():
            for product, x, slope in pending.pairs:
                left, right = (slope, x) if product.weight.transposed else (x, slope)
                way = id(product.parameter), product.weight.steps
                _add(sums, way, product.parameter, _WEIGHT_GRADIENT(left, right))
            for (number, steps), (parameter, gradient) in sums.items():
                for step in reversed(steps):
                    (gradient,) = communicator(self._tree.mesh).cell(step).collective.bprop(None, None, gradient)
                _add(totals, number, parameter, gradient)
        return tuple(totals.values())

    def discard(self):
        """Forget what a backward pass left, after an error in it, that nobody takes."""
        for product in self._products.values():
            product.arrived.clear()

    def attach(self, program):
        """Give the Cell of a new program the objects that stand for its deferred operators."""
        below = program.source.deferrals
        structure, ordinary = deferred_weights(program.path, program.generated, program.graph, below)
        self._ordinary |= {id(self._parameter(path)) for path in ordinary}
        alike = {}

        def products(entry):
            if isinstance(entry, tuple):
                return tuple(map(products, entry))
            alike[entry] = alike.get(entry, -1) + 1
            return self._product(entry, alike[entry])

        self._tree.cells[program.path].__dict__[f"{PRODUCTS}_of_{program.name}"] = products(structure)

    def _parameter(self, path):
        owner, _, name = path.rpartition(".")
        return self._tree.cells[owner]._params[name]

    def _product(self, weight, number):
        key = weight, number
        if key not in self._products:
            tree_number = self._tree.cells[""].sharded_cell_number
            name = f"collector.{tree_number}.{len(self._products)}.{weight.path}"  # unlike any other in a graph
            self._products[key] = DeferredProduct(weight, self._parameter(weight.path), name)
        return self._products[key]


def _add(sums, key, parameter, gradient):
    sums[key] = parameter, (ops.add(sums[key][1], gradient) if key in sums else gradient)


class DeferredProduct(nn.Cell):
    """One deferred operator: `x @ weight` or `x @ weight.T`, and a bias: (…, in) → (…, out).

    Args:
        weight: the `DeferredWeight`.
        parameter: its Parameter.
        name: what its collectors are called.

    Attributes:
        collectors: two Parameters whose gradients are the input and the gradient of the output, in two dims.
        arrived: pairs of them, from PyNative's backward passes.
    """

    def __init__(self, weight: DeferredWeight, parameter, name):
        super().__init__(auto_prefix=False)
        self.operator = _Product(weight.transposed)
        vars(self).update(weight=weight, parameter=parameter, arrived=[])
        for side in ("of_input", "of_output"):
            vars(self)[side] = Parameter(Tensor([0.0], mstype.float32), name=f"{name}.{side}")
        vars(self)["collectors"] = self.of_input, self.of_output

    def __call__(self, x, weight, bias=None):
        y = _Recorded.apply(x, weight, self.of_input, self.of_output, self)
        return y if bias is None else ops.add(y, bias)

    def construct(self, x, weight, bias=None):
        y = self.operator(x, weight, self.of_input, self.of_output)
        return y if bias is None else ops.add(y, bias)


class _Product(nn.Cell):
    """The operator in a graph. Each has its own: one that two calls share loses the input of the second."""

    def __init__(self, transposed):
        super().__init__(auto_prefix=False)
        self.transposed = transposed
        self.multiply = ops.MatMul(transpose_b=transposed)
        self.multiply_back = ops.MatMul(transpose_b=not transposed)

    def construct(self, x, weight, of_input, of_output):
        return self.forward(x, weight)

    def bprop(self, x, weight, of_input, of_output, out, dout):
        # nobody takes the weight's gradient, which is cut off before
        return self.backward(x, weight, dout), weight, rows_of(x), rows_of(dout)

    def forward(self, x, weight):
        """The product."""
        size = weight.shape[0] if self.transposed else weight.shape[1]
        return ops.reshape(self.multiply(rows_of(x), weight), x.shape[:-1] + (size,))

    def backward(self, x, weight, slope):
        """The gradient of the input."""
        return ops.reshape(self.multiply_back(rows_of(slope), weight), x.shape)


class _Recorded(_Function):
    """The operator in PyNative: its backward keeps the pair in the `DeferredProduct`."""

    @staticmethod
    def forward(ctx, x, weight, of_input, of_output, product):
        """The product. That the collectors' gradients are asked for has the backward called, even if x's isn't."""
        ctx.save_for_backward(x, weight)
        ctx.product = product
        return product.operator.forward(x, weight)

    @staticmethod
    def backward(ctx, slope):
        """The gradient of the input alone."""
        x, weight = ctx.saved_tensors
        ctx.product.arrived.append((rows_of(x), rows_of(slope)))
        return ctx.product.operator.backward(x, weight, slope), None, *ctx.product.collectors, None


def rows_of(tensor):
    """A tensor of any dims as a matrix."""
    return ops.reshape(tensor, (-1, tensor.shape[-1]))
