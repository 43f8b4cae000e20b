"""Entries of `layer_swap` and `op_swap`, in every form in which they can be given, checked. Pure Python."""

from dataclasses import dataclass

from mindformers_core.mesh import nearest
from mindformers_core.recompute.layers import LAYERS_FORMS, common_layers, layer_numbers
from mindformers_core.recompute.setting_checks import check_pattern, checked_prefetch

__all__ = ["LayerSwap", "OperatorSwap", "layer_swaps", "operator_swaps"]

_LAYER_FORM = "; layer_swap is given as [{layers: 0-3, backward_prefetch: 2}]"
_OPERATOR_FORMS = (
    "; op_swap is given as {'*.mlp': true, '*.cast': {layers: 0-3, backward_prefetch: 2}} or [{op_name: '*.mlp', "
    "layers: 0-3}]"
)
_LAYER_ENTRY = f"a mapping with layers and backward_prefetch{_LAYER_FORM}"
_OPERATOR_ENTRY = f"a mapping with op_name, layers and backward_prefetch{_OPERATOR_FORMS}"
_SETTINGS = (
    "true for all layers, or a mapping with layers and backward_prefetch; {layers: 0-3, backward_prefetch: 2} is one"
)


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
    for where, entry in _listed(() if given is None else given, "layer_swap", _LAYER_ENTRY):
        _check_keys(entry, ("layers", "backward_prefetch"), where, _LAYER_FORM)
        if "layers" not in entry:
            raise ValueError(f"{where}.layers: missing; it should be {LAYERS_FORMS}")
        found.append((where, LayerSwap(*_layers_and_prefetch(entry, where, default_prefetch))))
    return _apart(found)


def operator_swaps(given, default_prefetch):
    """The `OperatorSwap`s that `op_swap` means; errors as of `layer_swaps`."""
    found = []
    for where, entry in _named(given):
        known = ("op_name", "layers", "backward_prefetch")
        _check_keys(entry, known, where, _OPERATOR_FORMS)
        if "op_name" not in entry:
            raise ValueError(
                f"{where}.op_name: missing; it should be a pattern, as {{op_name: '*.mlp', layers: 0-3}}; everything "
                "in some layers is given to layer_swap"
            )
        check_pattern(entry["op_name"], f"{where}.op_name")
        found.append((where, OperatorSwap(entry["op_name"], *_layers_and_prefetch(entry, where, default_prefetch))))
    return _apart(found)


def _named(given):
    """`(where, dict)` of the entries of `op_swap`, in either form, all with their `op_name`."""
    if not isinstance(given, dict) or _is_entry(given):
        yield from _listed(() if given is None else given, "op_swap", _OPERATOR_ENTRY)
        return
    for pattern, settings in given.items():
        where = f"op_swap[{pattern!r}]"
        if settings in ([], ()):
            raise ValueError(f"{where}: {settings} has no entry: leave it out, or give true for all layers")
        for inner, entry in _listed({} if settings is True else settings, where, _SETTINGS):
            _check_keys(entry, ("layers", "backward_prefetch"), inner)
            yield inner, {"op_name": pattern, **entry}


def _is_entry(given):
    """Whether a dict is one entry of `op_swap`, not patterns with theirs; it may lack its pattern."""
    layers = given.get("layers")
    numbers = isinstance(layers, (list, tuple)) and not any(isinstance(each, dict) for each in layers)
    return bool({"op_name", "backward_prefetch"} & {*given}) or isinstance(layers, str) or numbers


def _listed(given, where, form):
    """`(where, dict)` of every entry of a list of dicts, or of the only one; `form`: what each should be."""
    several = isinstance(given, (list, tuple))
    for index, entry in enumerate(given if several else (given,)):
        path = f"{where}[{index}]" if several else where
        if isinstance(entry, (LayerSwap, OperatorSwap)):
            entry = vars(entry)
        if not isinstance(entry, dict):
            raise TypeError(f"{path}: {entry!r} should be {form}")
        yield path, entry


def _check_keys(entry, known, where, form=""):
    for key in entry:
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown key{nearest(key, known)}; known: {', '.join(known)}{form}")


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
