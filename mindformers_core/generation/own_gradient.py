"""Source of a distributed algorithm with its own gradient: a Cell with a `bprop`.

MindSpore's compiler mixes up the results of several calls of one Cell, can't differentiate where integers pass, and
fails at a function with a branch that `construct` and `bprop` both reach (see docs/mindspore.md). So within the Cell
results have a dim more, in front, integers come as float32, and the two call collectives of their own.
"""

from mindformers_core.operators.signature import is_float


def algorithm_comment(plan):
    """What replaces an operator, by its `OperatorPlan`."""
    return f"{plan.node.operator} over {', '.join(plan.cut_axes) or 'all parts'}: {plan.algorithm}"


def own_gradient_lines(plan, writer):
    """The lines of the methods of the Cell.

    Args:
        plan: the `OperatorPlan`.
        writer: a `_FunctionWriter` that has written nothing yet.
    """
    given = [value for value, _ in plan.consumed]
    for name in ("out", "dout"):
        writer.names.keep(name)
    inputs = [writer.variable(value.hint) for value in given]
    made = [name for name in ("out", "dout") for _ in plan.outputs]
    places = [*range(len(plan.outputs))] * 2

    def method(name, more, end):
        writer.body, writer.number = [], len(more)
        taken = [
            variable if is_float(value.dtype) else writer.assign(variable, f"ops.cast({variable}, ms.{value.dtype})")
            for value, variable in zip(given, inputs)
        ]
        taken += [writer.assign(each, f"{each}[{place}][0]") for each, place in zip(made, places) if more]
        found = iter(writer.algorithm_parts(plan, taken, plan.algorithm, of_gradient=bool(more)))
        head = f"def {name}({', '.join(['self', *inputs, *more])}):"
        return [head, *(f"    {line}" for line in writer.body), f"    return ({', '.join(end(found))},)"]

    def results(found):
        return [f"ops.expand_dims({each}, 0)" for each in found]

    def gradients(found):
        pairs = zip(given, inputs)
        return [next(found) if is_float(value.dtype) else f"ops.zeros_like({variable})" for value, variable in pairs]

    lines = [f'"""{algorithm_comment(plan)}, with its own gradient."""', ""]
    lines += ["def __init__(self, number=0):", "    super().__init__(auto_prefix=False)", ""]
    return [*lines, *method("construct", (), results), "", *method("bprop", ("out", "dout"), gradients)]
