"""`write_curve()`: what was chosen under a budget, as a picture of what memory costs, and in words."""

from mindformers_core.files import write_whole
from mindformers_core.program.operator_names import operator_texts
from mindformers_core.recompute.budget import described
from mindformers_core.recompute.curve import curve_picture
from mindformers_core.sharding.sharded_cells import tree_of_root

__all__ = ["write_curve"]


def write_curve(cell, path):
    """Write the Pareto curve of a Cell under a budget: saved bytes against what is computed again, and what was chosen.

    It is that of the program that ran last: of a call, `value_and_grad`, or `prepare()`.

    Args:
        cell: the root of a sharded tree, after `recompute(cell, budget=…)`.
        path: of the file, an SVG picture.

    Returns:
        What was chosen, as a table in text: what is computed again, the bytes that this saves and the operations that
        it takes.

    Raises:
        TypeError: `cell` isn't sharded. ValueError: it is no root, has no budget, or no program yet; the
            budget is out of reach.
    """
    tree = tree_of_root(cell, "write_curve")
    policy = tree.activations
    if not policy.marks or policy.settings.budget is None:
        raise ValueError(f"{tree.label('')} has no budget: call recompute(cell, budget=0.5) with it before")
    frame = next((each.frame for each in reversed(tree.programs.values()) if each.frame in policy.choices), None)
    if frame is None:
        raise ValueError(f"{tree.label('')} has no program yet: call it, or prepare(cell, *inputs), before")
    choice = policy.choices[frame]
    if choice.problem:
        raise ValueError(choice.problem)
    write_whole(path, curve_picture(choice))
    texts = operator_texts(frame)
    head, *table = described(choice, lambda key: texts.get(key, "a redistribution"))
    return "\n".join([f"recompute, budget {policy.settings.budget:g}: {head}", *(f"  {line}" for line in table)])
