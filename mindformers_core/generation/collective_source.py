"""Source code of the collective of a `Step` in a generated module, and its name there."""

from mindformers_core.communication.communicator import collective_attributes
from mindformers_core.layout import Layout

__all__ = ["collective_name", "collective_source"]


def collective_source(step, number=0):
    """The expression for the Cell of a `Step`.

    Args:
        step: the `Step`. In the module `collectives` is the mesh's `Communicator`, and `mesh` the mesh.
        number: distinguishes several equal collectives.

    >>> all_gather = collective_source(step)
    'collectives.make("all_gather", axes=("tp",), dim=1)'
    """
    attributes = {"axes": step.axes} | collective_attributes(step) | ({"number": number} if number else {})
    return f'collectives.make("{step.kind}", {", ".join(f"{name}={_text(attributes[name])}" for name in attributes)})'


def collective_name(step):
    """The name of the Cell of a `Step`: `all_gather_tp_dim_1`, `reduce_scatter_dp_tp_dim_0_avg`.

    Different permutes over the same axes have the same name.
    """
    shown = {"dim": "dim_{}", "to_dim": "to_{}", "op": "{}"}
    attributes = [(name, value) for name, value in collective_attributes(step).items() if name in shown]
    return "_".join(
        [step.kind, *step.axes, *(shown[name].format(value) for name, value in attributes if value != "sum")]
    )


def _text(value):
    """Python source of an attribute's value."""
    text = f"Layout.on(mesh, {value.dims})" if isinstance(value, Layout) else repr(value)
    return text.replace("'", '"')
