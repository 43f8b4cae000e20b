"""The text that makes a step's collective in a generated module, and a name for it there."""

from mindformers_core.communication.communicator import collective_attributes
from mindformers_core.layout import Layout

__all__ = ["collective_name", "collective_source"]


def collective_source(step, number=0):
    """The expression for the Cell of a `Step`, where `collectives` is the mesh's `Communicator` and `mesh` the mesh;
    `number` tells several that are alike apart.

    >>> all_gather = collective_source(step)
    'collectives.make("all_gather", axes=("tp",), dim=1)'
    """
    attributes = [f"axes={_text(step.axes)}"]
    attributes += [f"{name}={_text(value)}" for name, value in collective_attributes(step).items()]
    attributes += [f"number={number}"] if number else []
    return f'collectives.make("{step.kind}", {", ".join(attributes)})'


def collective_name(step):
    """What the Cell of a `Step` is called: `all_gather_tp_dim_1`, `reduce_scatter_dp_tp_dim_0_avg`.

    Different permutes over the same axes have the same name.
    """
    attributes = collective_attributes(step)
    parts = [step.kind, *step.axes]
    parts += [f"dim_{attributes['dim']}"] if "dim" in attributes else []
    parts += [f"to_{attributes['to_dim']}"] if "to_dim" in attributes else []
    parts += [attributes["op"]] if attributes.get("op", "sum") != "sum" else []
    return "_".join(parts)


def _text(value):
    """Python source of an attribute's value."""
    if isinstance(value, Layout):
        return f"Layout.on(mesh, {_text(value.dims)})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    return f'"{value}"' if isinstance(value, str) else repr(value)
