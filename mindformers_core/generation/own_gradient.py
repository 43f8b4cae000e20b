"""Source of the own gradient of a distributed algorithm: a Cell with a `bprop`, which takes the algorithm's results.

In a compiled function that PyNative differentiates, a `bprop` gets the results of its Cell's last call, integers can't
pass, and `construct` and `bprop` can't both reach a function with a branch (see docs/mindspore.md). So the algorithm
runs before the Cell, without a gradient; the Cell takes its results as arguments, and gives them with a dim more, in
front; integers come as float32; and collectives of the `bprop` are Cells of their own.
"""

from mindformers_core.operators.signature import is_float


def own_gradient_lines(plan, comment, writer):
    """The lines of the methods of the Cell.

    Args:
        comment: what the algorithm is.
        writer: a `_FunctionWriter` that has written nothing yet.
    """
    for name in ("out", "dout"):
        writer.names.keep(name)
    given = [value for value, _ in plan.consumed]
    inputs, results, gradients = (
        [writer.variable(hint) for hint in hints]
        for hints in ([value.hint for value in given], *[[hint] * len(plan.outputs) for hint in ("result", "gradient")])
    )
    writer.number = 1
    taken = [
        variable if is_float(value.dtype) else writer.assign(variable, f"ops.cast({variable}, ms.{value.dtype})")
        for value, variable in zip(given, inputs)
    ]
    given_back = enumerate(zip(gradients, plan.local_shapes))
    writer.body += [f"{name} = ops.reshape(dout[{place}], {shape})" for place, (name, shape) in given_back]
    found = iter(writer.algorithm_parts(plan, taken + results + gradients, plan.algorithm, of_gradient=True))
    ends = [next(found) if is_float(value.dtype) else f"ops.zeros_like({name})" for value, name in zip(given, inputs)]
    ends += [f"ops.zeros_like({name})" for name in results]
    count, arguments = len(inputs + results), ", ".join(["self", *inputs, *results])
    return [
        f'"""{comment}: its gradient."""', "",
        "def __init__(self, number=0):", "    super().__init__(auto_prefix=False)",
        f"    self.used_bprop_inputs = {(*range(count), count + 1)}  # all but the results of this Cell", "",
        f"def construct({arguments}):",
        f"    return ({', '.join(f'ops.expand_dims({name}, 0)' for name in results)},)", "",
        f"def bprop({arguments}, out, dout):", *(f"    {line}" for line in writer.body),
        f"    return ({', '.join(ends)},)",
    ]  # fmt: skip
