"""Entries of `layer_swap` and `op_swap`, checked. Pure Python."""

from dataclasses import dataclass

from mindformers_core.hints import nearest
from mindformers_core.recompute.layers import common_layers, layer_numbers
from mindformers_core.recompute.setting_checks import check_pattern, checked_prefetch

__all__ = ["LayerSwap", "OperatorSwap", "layer_swaps", "operator_swaps"]

_FORMS = {
    "layer_swap": "[{layers: 0-3, backward_prefetch: 2}]",
    "op_swap": "{'*.mlp': true, '*.cast': {layers: 0-3, backward_prefetch: 2}} or [{op_name: '*.mlp', layers: 0-3}]",
}


@dataclass(frozen=True)
class LayerSwap:
    """Layers of which everything that is saved goes to the host.

    Attributes:
        layers: True for all, or their numbers, in ascending order.
        backward_prefetch: how many saved tensors ahead of its use one is copied back.
    """

    layers: bool | tuple[int, ...]
    backward_prefetch: int


@dataclass(frozen=True)
class OperatorSwap:
    """Operators, or Cells, of which everything that is saved goes to the host.

    Attributes:
        op_name: their pattern.
        layers: True, or numbers of the only layers in which it counts, in ascending order.
        backward_prefetch: how many saved tensors ahead of its use one is copied back.
    """

    op_name: str
    layers: bool | tuple[int, ...]
    backward_prefetch: int


def layer_swaps(given, default_prefetch):
    """The `LayerSwap`s that `layer_swap` means.

    Raises:
        TypeError, ValueError: no form of it, or layers that are given twice; begins with the key.
    """
    found = []
    for where, entry in _listed(given, "layer_swap"):
        _check(entry, where, "layer_swap", ("layers", "backward_prefetch"), "layers")
        found.append((where, LayerSwap(*_layers_and_prefetch(entry, where, default_prefetch))))
    return _apart(found)


def operator_swaps(given, default_prefetch):
    """The `OperatorSwap`s that `op_swap` means; errors as of `layer_swaps`."""
    found = []
    if isinstance(given, dict):
        for pattern, settings in given.items():
            where, entry = f"op_swap[{pattern!r}]", {} if settings is True else settings
            _check(entry, where, "op_swap", ("layers", "backward_prefetch"))
            found.append((where, {"op_name": pattern, **entry}))
    else:
        found = _listed(given, "op_swap")
        for where, entry in found:
            _check(entry, where, "op_swap", ("op_name", "layers", "backward_prefetch"), "op_name")
    for where, entry in found:
        check_pattern(entry["op_name"], f"{where}.op_name")
    return _apart(
        [(where, OperatorSwap(e["op_name"], *_layers_and_prefetch(e, where, default_prefetch))) for where, e in found]
    )


def _listed(given, key):
    """`(where, entry)` of every entry of a list; what settings have made of one is taken again."""
    if not isinstance(given, (list, tuple, type(None))):
        raise TypeError(f"{key}: {given!r} should be given as {_FORMS[key]}")
    made = LayerSwap, OperatorSwap
    return [(f"{key}[{place}]", vars(e) if isinstance(e, made) else e) for place, e in enumerate(given or ())]


def _check(entry, where, key, known, needed=None):
    form = f"{key} is given as {_FORMS[key]}"
    if not isinstance(entry, dict):
        raise TypeError(f"{where}: {entry!r} should be a mapping with {', '.join(known)}; {form}")
    for name in entry:
        if name not in known:
            raise ValueError(f"{where}.{name}: unknown key{nearest(name, known)}; known: {', '.join(known)}; {form}")
    if needed and needed not in entry:
        raise ValueError(f"{where}.{needed}: missing; {form}")


def _layers_and_prefetch(entry, where, default_prefetch):
    layers = layer_numbers(entry.get("layers", True), f"{where}.layers")
    if layers is None:
        raise ValueError(f"{where}.layers: {entry['layers']} means no layer: leave the entry out")
    prefetch = entry.get("backward_prefetch")
    return layers, checked_prefetch(default_prefetch if prefetch is None else prefetch, f"{where}.backward_prefetch")


def _apart(found):
    """The entries of `(where, entry)` pairs, of which no two are about the same thing in the same layer."""
    for index, (where, entry) in enumerate(found):
        for earlier_where, earlier in found[:index]:
            shared = common_layers(entry.layers, earlier.layers)
            if shared and getattr(entry, "op_name", None) == getattr(earlier, "op_name", None):
                which = "all layers are" if shared is True else f"layer {shared[0]} is"
                raise ValueError(
                    f"{where}.layers: {which} in {earlier_where}, too: give one backward_prefetch for each"
                )
    return tuple(entry for _, entry in found)
