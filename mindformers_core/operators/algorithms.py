"""The distributed algorithms that replace operators along cut dims, as a table: names and facts. Pure Python.

Rules choose among these names, and the floor that runs operators has a function for each: see
`register_algorithm`.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """All that is known of a distributed algorithm but its code.

    Attributes:
        name: by which rules ask for it.
        text: what it does, for a reader of `explain()`.
        by_position: whether results depend on positions along the cut dim, whose parts are then contiguous.
        function: of a user's own algorithm, `function(operator, args, context)`: the results for a rank's parts of the
            tensors. `operator` computes the plain one, and `context`, a `ShardContext`, has the collectives.
        gradient: where it isn't that of the operators and redistributions of `function`: `gradient(args, results,
            gradients, context)`, in order the gradients of the floating tensors among `args`. The backward pass then
            keeps the algorithm's inputs and results alone.
        by_shapes: whether functions of it need no values, so that eager calls price it, too; else it is free there.
        gathers: whether ranks send elements of the tensor itself, so that its cut ends there as by a gather: what costs
            less is chosen.
    """

    name: str
    text: str
    by_position: bool = True
    function: Callable | None = None
    gradient: Callable | None = None
    by_shapes: bool = False
    gathers: bool = False


_ANYWHERE = {  # names -> text, of algorithms for which positions along the dim don't matter
    "mean": "each part's mean over the number of parts",
    "max min": "the extreme of all parts' extremes",
    "softmax log_softmax logsumexp": "the maximum of all parts, then the sum of their exponentials",
    "softmax_cross_entropy": "the maximum of all parts, then the sum of their exponentials, then that of their losses",
}
_BY_POSITION = {
    "sparse_cross_entropy likelihood": "each label is looked up in the part that has its class; losses are added",
    "norm": "the norm of all parts' norms",
    "norm_max norm_min": "the extreme of all parts' absolute values",
    "prod": "the product of all parts' products",
    "all any": "whether all, or any, of the parts' answers are true",
    "std std_mean var var_mean": "means of all parts, then the squares of differences from them, added",
    "group_norm": "means and variances over all parts",
    "argmax argmin max_with_index min_with_index max_dim min_dim max_pair min_pair max_first min_first":
        "the extreme of all parts, then its first position",
    "segment_max segment_min": "the extreme of all parts in each segment",
    "band trace": "each part knows which rows and columns it has",
    "halo halo_of_largest halo_with_index": "borders of neighbouring parts, then windows",
    "pad": "elements shifted into neighbouring parts",
    "slice": "each part puts what it has into zeros; these are added",
    "gather gather_elements gather_nd embedding embedding_lookup": "each part looks up what it has; results are added",
    "scatter scatter_nd index_put": "each part takes the updates that fall into it",
    "cumsum cumprod logcumsumexp cummax cummin": "totals of the parts before, then each part's own",
    "top_k": "the largest of the largest of all parts",
    "uniform normal integers permutation dropout func_dropout attention_dropout": "numbers by global position",
}  # fmt: skip
ALGORITHMS = {
    name: Algorithm(name, text, table is _BY_POSITION, gathers=name == "slice")
    for table in (_ANYWHERE, _BY_POSITION)
    for names, text in table.items()
    for name in names.split()
}
