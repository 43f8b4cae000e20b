"""The backward pass in two parts, for zero-bubble schedules: gradients of inputs first, gradients of weights later.

After `split_weight_gradients(cell)` the programs of a sharded Cell split the gradients of every matmul whose weight is
a trained parameter: the backward pass computes the gradient of the matmul's input, and keeps the operands of the
weight's gradient, the pair (input, gradient of the output). The weight's gradient is one matmul of the pair, which can
run at any later time (Qi et al., "Zero bubble pipeline parallelism", 2023). Biases, norms and embeddings are cheap, and
keep their ordinary gradient.

In PyNative the operator's backward function appends the pair to a list. A compiled graph has no side effects: there
each operator has two Parameters of one element as further inputs, its *collectors*, and returns the pair as their
gradients.

    deferred = split_weight_gradients(shard(stage, mesh))
    …  # forward calls of any number of micro-batches
    weights = (*deferred.ordinary_parameters, *deferred.collectors)
    gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(stage, ParameterTuple(weights))
    of_inputs, of_weights = gradient(*inputs, sens)  # of one micro-batch, in any order
    pending = deferred.take(of_weights[len(deferred.ordinary_parameters) :])
    …  # much later
    for parameter, part in deferred.weight_gradients(pending): …  # to be added to its ordinary gradient, if it has one
"""

from mindspore import Parameter, Tensor, dtype as mstype, nn, ops

from mindformers_core.communication import communicator
from mindformers_core.mindspore_private import Function, no_grad
from mindformers_core.program.deferral import PRODUCTS, DeferredWeight, deferred_weights
from mindformers_core.program.structure import tree_map
from mindformers_core.sharding.declare import parameter_at
from mindformers_core.sharding.sharded_cells import computing_parameters, tree_of_root

_WEIGHT_GRADIENT = ops.MatMul(transpose_a=True)


def split_weight_gradients(cell):
    """Defer the weight gradients of a Cell's matmuls in all backward passes, until `pause()` of the result.

    Deferred operators are matmuls and dense layers `x @ weight` or `x @ weight.T`, with a `weight` of two dims and any
    input. The gradients of a weight with several uses, deferred or not, are summed. `mindformers_core.jit` compiles a
    Cell again when it is split; plain `mindspore.jit` doesn't.

    Args:
        cell: the root of a tree that `shard()` made, in its generated mode; on one card, shard it over a mesh of one.

    Returns:
        The `DeferredGradients` of the tree, the same object at every call.

    Raises:
        TypeError: `cell` isn't sharded. ValueError: it isn't the root of its tree, or runs operator by operator.
    """
    tree = tree_of_root(cell, "split_weight_gradients")
    if tree.deferred_gradients is None:
        tree.deferred_gradients = DeferredGradients(tree)
    tree.deferring = True
    return tree.deferred_gradients


class DeferredGradients:
    """The deferred weight gradients of a sharded tree. All tensors are this rank's shards.

    A program for new shapes, made by the first forward call with them or by `prepare()`, may add collectors: read
    `collectors` and the parameters after that. Programs share collectors where they can.
    """

    def __init__(self, tree):
        self._tree = tree
        self._products = {}  # (DeferredWeight, number of equal ones before it in the program) -> DeferredProduct
        self._ordinary = set()

    @property
    def parameters(self):
        """The Parameters with a gradient that is deferred, wholly or in part: a tuple."""
        return tuple({id(product.parameter): product.parameter for product in self._products.values()}.values())

    @property
    def ordinary_parameters(self):
        """The trained Parameters with a gradient that the backward pass computes, wholly or in part: a tuple.

        The others needn't be among the weights of `GradOperation`, which returns zeros for them.
        """
        whole = {id(parameter) for parameter in self.parameters} - self._ordinary
        return tuple(p for p in computing_parameters(self._tree.cells[""]) if p.requires_grad and id(p) not in whole)

    @property
    def collectors(self):
        """The Parameters that have to be the last weights of `GradOperation`, also in PyNative: a tuple.

        Without them, the backward pass skips a product that no other gradient depends on. They are no parameters of
        the Cell: optimizers and checkpoints don't contain them.
        """
        return tuple(collector for product in self._products.values() for collector in product.collectors)

    def pause(self):
        """Have backward passes compute all gradients, until the Cell is split again."""
        self._tree.deferring = False

    def take(self, collector_gradients=()):
        """The operands of the weight gradients of the last backward pass; call it once after each backward pass.

        Args:
            collector_gradients: the gradients of `collectors`, in their order; may be left out in PyNative.

        Returns:
            For every deferred operator `(DeferredProduct, input, gradient of the output)`, of the shapes (rows, in)
            and (rows, out): a tuple for `weight_gradients`, which keeps the tensors alive.

        Raises:
            ValueError: the number of gradients isn't that of `collectors`; or no backward pass has run.
        """
        products = self._products.values()
        pairs = [(product, *pair) for product in products for pair in product.arrived]
        self.discard()
        if collector_gradients:
            if len(collector_gradients) != 2 * len(products):
                raise ValueError(
                    f"{self._tree.label('')} has {2 * len(products)} collectors, and take() got the gradients of "
                    f"{len(collector_gradients)}: there are more after a forward call with new shapes, so ask for "
                    "`collectors` again and make GradOperation anew"
                )
            gradients = iter(collector_gradients)
            # one dim: the product is part of another program, or ran in PyNative, where its pair has arrived
            pairs += [pair for pair in zip(products, gradients, gradients) if pair[1].ndim > 1]
        if not pairs and self._products:
            raise ValueError(
                f"{self._tree.label('')}: no gradient has arrived for later. Call take() after a backward pass, and in "
                "a compiled one give it the gradients of `collectors`, the last weights of GradOperation"
            )
        return tuple(pairs)

    def weight_gradients(self, pending):
        """Compute the weight gradients that a backward pass has deferred, in PyNative: one matmul for each operator.

        Gradients take the redistributions of the weight in reverse, so a call may run collectives: all ranks of the
        mesh have to make their calls in the same order.

        Args:
            pending: the result of `take`.

        Returns:
            Pairs (Parameter, its gradient or the deferred part of its gradient), each Parameter once.
        """
        sums, totals = {}, {}
        with no_grad():
            for product, x, slope in pending:
                left, right = (slope, x) if product.weight.transposed else (x, slope)
                key = id(product.parameter), product.weight.steps
                _add(sums, key, product.parameter, _WEIGHT_GRADIENT(left, right))
            for (number, steps), (parameter, gradient) in sums.items():
                for step in reversed(steps):
                    (gradient,) = communicator(self._tree.mesh).cell(step).collective.bprop(None, None, gradient)
                _add(totals, number, parameter, gradient)
        return tuple(totals.values())

    def discard(self):
        """Drop the pairs of a backward pass that failed."""
        for product in self._products.values():
            product.arrived.clear()

    def attach(self, program):
        """Give the Cell of a new program the `DeferredProduct`s of its deferred operators, as an attribute."""
        below = program.source.deferrals
        structure, ordinary = deferred_weights(program.path, program.generated, program.graph, below)
        self._ordinary |= {id(parameter_at(path, self._tree.cells)) for path in ordinary}
        alike = {}

        def product(weight):
            alike[weight] = alike.get(weight, -1) + 1
            return self._product(weight, alike[weight])

        self._tree.cells[program.path].__dict__[f"{PRODUCTS}_of_{program.name}"] = tree_map(product, structure)

    def _product(self, weight, number):
        key = weight, number
        if key not in self._products:
            tree_number = self._tree.cells[""].sharded_cell_number
            name = f"collector.{tree_number}.{len(self._products)}.{weight.path}"  # unique in every graph
            self._products[key] = DeferredProduct(weight, parameter_at(weight.path, self._tree.cells), name)
        return self._products[key]


def _add(sums, key, parameter, gradient):
    sums[key] = parameter, (ops.add(sums[key][1], gradient) if key in sums else gradient)


class DeferredProduct(nn.Cell):
    """One deferred operator: `x @ weight` or `x @ weight.T`, and a bias: (…, in) → (…, out).

    Args:
        weight: the `DeferredWeight`.
        name: prefix of the names of its collectors.

    Attributes:
        collectors: two Parameters whose gradients are the input and the gradient of the output, in two dims.
        arrived: the pairs of PyNative's backward passes.
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
    """The operator in a graph. Every product has its own: MindSpore loses the second input of a shared one."""

    def __init__(self, transposed):
        super().__init__(auto_prefix=False)
        self.transposed = transposed
        self.multiply = ops.MatMul(transpose_b=transposed)
        self.multiply_back = ops.MatMul(transpose_b=not transposed)

    def construct(self, x, weight, of_input, of_output):
        size = weight.shape[0] if self.transposed else weight.shape[1]
        return ops.reshape(self.multiply(rows_of(x), weight), x.shape[:-1] + (size,))

    def bprop(self, x, weight, of_input, of_output, out, dout):
        # the weight is detached before, so its gradient is never used
        return ops.reshape(self.multiply_back(rows_of(dout), weight), x.shape), weight, rows_of(x), rows_of(dout)


class _Recorded(Function):
    """The operator in PyNative: its backward function appends the pair to `DeferredProduct.arrived`.

    The collectors are inputs so that the backward function runs even where the gradient of `x` isn't needed.
    """

    @staticmethod
    def forward(ctx, x, weight, of_input, of_output, product):
        ctx.save_for_backward(x, weight)
        ctx.product = product
        return product.operator.construct(x, weight, of_input, of_output)

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        of_x, _, *pair = ctx.product.operator.bprop(x, weight, None, None, None, slope)
        ctx.product.arrived.append(tuple(pair))
        return of_x, None, *ctx.product.collectors, None


def rows_of(tensor):
    """A tensor of any dims as a matrix of its last dim."""
    return ops.reshape(tensor, (-1, tensor.shape[-1]))
