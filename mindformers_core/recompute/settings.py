"""What is computed again, and what is kept on the host, as it was asked for, checked. Pure Python.

Keys are those of MindSpore Transformers: `mp_comm_recompute` and `parallel_optimizer_comm_recompute` of its page
"Memory Optimization" (r1.9, `recompute_config`); `swap`, `default_prefetch`, `layer_swap` and `op_swap` of its page
"Fine-Grained Activations SWAP" (r1.5, `swap_config`); ranges of layers as texts of its page "Training Memory
Optimization" (r2.0). Numbers of layers say which ones of the whole model, as the second page has it, not how many of
every pipeline stage.
"""

from dataclasses import dataclass, field
from numbers import Real
from typing import ClassVar

from mindformers_core.mesh import nearest
from mindformers_core.recompute.layers import LAYERS_FORMS, common_layers, layer_numbers

__all__ = [
    "DEFAULT_OP_SWAP",
    "LayerSwap",
    "OperatorSwap",
    "RecomputeSettings",
    "SwapSettings",
    "check_budget",
    "layer_numbers",
]

# MindSpore Transformers swaps its flash_attention operators; here attention may be written in plain operators, too
DEFAULT_OP_SWAP = "*.self_attn"


def _as_given(default=None):
    """A field whose value a recipe's loader hands over as it is: its forms are checked here."""
    return field(default=default, metadata={"as_given": True})


def check_budget(budget, where="recompute.budget"):
    """Raise unless `budget` is a number above 0, and 1 at the most.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of this range.
    """
    allowed = "a number above 0 and at most 1: the part of the saved activations' bytes that may stay (1: all)"
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(f"{where}: {budget!r} ({type(budget).__name__}) has to be {allowed}")
    if not 0 < budget <= 1:
        per_cent = f"; {budget} % is {budget / 100:g}" if 1 < budget <= 100 else ""
        raise ValueError(f"{where}: {budget!r} has to be {allowed}{per_cent}")


@dataclass(frozen=True)
class RecomputeSettings:
    """What the backward pass computes again, from what it keeps. Checked, and in one form, when made.

    Attributes:
        full: layers that are recomputed wholly: None, True (all entries of CellLists and CellDicts), or their numbers,
            in ascending order; given in any form that `layer_numbers` takes.
        select: patterns of what else is recomputed, operators or Cells; one may be given without a list.
        exclude: patterns of what never is, whatever else says.
        mp_comm_recompute: whether collectives in what is recomputed run again, as in `Cell.recompute`; if not, their
            results are kept.
        parallel_optimizer_comm_recompute: whether weights that were gathered for a recomputed part (level 3 of `hsdp`)
            are dropped after forward and gathered again; False: kept until backward. None: as `hsdp` was told with
            `reshard_after_forward`.
        budget: the part of the saved bytes that may be kept, more than 0 and at most 1: what is recomputed is chosen
            so. Instead of `full` and `select`.

    Raises:
        TypeError, ValueError: anything else, or keys that exclude each other; the message begins with the key.
    """

    switch: ClassVar[str] = "full"  # the key that `recompute: true` in a recipe stands for
    # MindSpore Transformers' keys, of r1.9 and of r2.0
    called: ClassVar[dict] = {
        **dict.fromkeys(("recompute", "full_recompute_layer"), "full"),
        **dict.fromkeys(("select_recompute", "select_module"), "select"),
        **dict.fromkeys(("select_recompute_exclude", "exclude_op"), "exclude"),
    }

    full: bool | tuple[int, ...] | None = _as_given()
    select: tuple[str, ...] = _as_given(())
    exclude: tuple[str, ...] = _as_given(())
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool | None = None
    budget: float | None = None

    def __post_init__(self):
        _put(self, full=layer_numbers(self.full, "full"))
        _put(self, select=_patterns(self.select, "select"), exclude=_patterns(self.exclude, "exclude"))
        _check_flag(self.mp_comm_recompute, "mp_comm_recompute")
        if self.parallel_optimizer_comm_recompute is not None:
            _check_flag(self.parallel_optimizer_comm_recompute, "parallel_optimizer_comm_recompute")
        self._check_budget()
        if self.exclude and not self.is_on:
            raise ValueError(
                f"exclude: {list(self.exclude)} is taken out of what is recomputed, but nothing is: give full, select "
                "or budget, or leave it out"
            )

    def _check_budget(self):
        budget = self.budget
        if budget is None:
            return
        check_budget(budget, "budget")
        for name in ("full", "select"):
            given = getattr(self, name)
            if given:
                raise ValueError(
                    f"budget: {budget} chooses what is recomputed, but {name} says it, too "
                    f"({_shown(given)}): give one of the two; exclude can stand beside either"
                )

    @property
    def is_on(self):
        """Whether anything is to be recomputed."""
        return bool(self.full or self.select or self.budget is not None)


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


@dataclass(frozen=True)
class SwapSettings:
    """What goes to the host in the forward pass and back in the backward pass. Checked, and in one form, when made.

    Attributes:
        swap: whether anything is swapped; default: where `layer_swap` or `op_swap` is given. True with neither of them:
            attention of all layers, `DEFAULT_OP_SWAP`. False: nothing, whatever else is given.
        default_prefetch: how many saved tensors ahead of its use in the backward pass one is copied back, where
            nothing else is said. (In MindSpore Transformers for the default alone, in which it says
            `backward_prefetch` everywhere else.) More hide the copies better and need more memory.
        layer_swap: `LayerSwap`s; given as a list of dicts of `layers`, in a form that `layer_numbers` takes, and
            `backward_prefetch`.
        op_swap: `OperatorSwap`s; given as a list of such dicts with `op_name`, too, or as a dict of patterns, each with
            such a dict, a list of them, or True. Without `layers` it counts in all.

    Raises:
        TypeError, ValueError: anything else, or layers with two values of `backward_prefetch`; the message begins with
            the key.
    """

    switch: ClassVar[str] = "swap"  # the key that `swap: true` in a recipe stands for
    called: ClassVar[dict] = {"enable": "swap"}  # in MindSpore Transformers r2.0

    swap: bool | None = None
    default_prefetch: int = 1
    layer_swap: tuple[LayerSwap, ...] = _as_given(())
    op_swap: tuple[OperatorSwap, ...] = _as_given(())

    def __post_init__(self):
        prefetch = _checked_prefetch(self.default_prefetch, "default_prefetch")
        if self.swap is not None:
            _check_flag(self.swap, "swap")
        layers, operators = _layer_swaps(self.layer_swap, prefetch), _op_swaps(self.op_swap, prefetch)
        if self.swap is None and not layers and not operators and prefetch != 1:
            raise ValueError(
                f"default_prefetch: {prefetch} is given, but nothing to swap: give swap=true, layer_swap or op_swap"
            )
        if self.swap and not layers and not operators:
            operators = (OperatorSwap(DEFAULT_OP_SWAP, True, prefetch),)
        is_on = bool(layers or operators) if self.swap is None else self.swap
        _put(self, swap=is_on, layer_swap=layers, op_swap=operators)

    @property
    def is_on(self):
        """Whether anything is to be swapped."""
        return self.swap


def _patterns(given, where):
    """One pattern or several, as a tuple; what they mean is checked where Cells are known."""
    if given is None:
        return ()
    entries = [given] if isinstance(given, str) else given
    if not isinstance(entries, (list, tuple)):
        raise TypeError(f"{where}: {given!r} should be a pattern, or a list of patterns, as ['layers.0-7.mlp']")
    for index, pattern in enumerate(entries):
        _check_pattern(pattern, where if isinstance(given, str) else f"{where}[{index}]")
    return tuple(entries)


def _check_pattern(pattern, where):
    if not isinstance(pattern, str):
        raise TypeError(f"{where}: {pattern!r} should be a pattern, a text as 'layers.0-7.mlp'")
    if not pattern.strip():
        raise ValueError(f"{where}: {pattern!r} is an empty pattern: it should name a Cell or an operator")


def _layer_swaps(given, default_prefetch):
    found = []
    for where, entry in _listed(() if given is None else given, "layer_swap"):
        _check_keys(entry, ("layers", "backward_prefetch"), where)
        if "layers" not in entry:
            raise ValueError(f"{where}.layers: missing; it should be {LAYERS_FORMS}")
        found.append((where, LayerSwap(*_layers_and_prefetch(entry, where, default_prefetch))))
    return _apart(found)


def _op_swaps(given, default_prefetch):
    found = []
    for where, entry in _named(given):
        _check_keys(entry, ("op_name", "layers", "backward_prefetch"), where)
        if "op_name" not in entry:
            raise ValueError(f"{where}.op_name: missing; it should be a pattern, as 'layers.0-7.mlp'")
        _check_pattern(entry["op_name"], f"{where}.op_name")
        found.append((where, OperatorSwap(entry["op_name"], *_layers_and_prefetch(entry, where, default_prefetch))))
    return _apart(found)


def _named(given):
    """`(where, dict)` of the entries of `op_swap`, in either form, all with their `op_name`."""
    if not isinstance(given, dict) or "op_name" in given:
        yield from _listed(() if given is None else given, "op_swap")
        return
    for pattern, settings in given.items():
        where = f"op_swap[{pattern!r}]"
        if settings in ([], ()):
            raise ValueError(f"{where}: {settings} has no entry: leave it out, or give true for all layers")
        for inner, entry in _listed({} if settings is True else settings, where, " or true"):
            _check_keys(entry, ("layers", "backward_prefetch"), inner)
            yield inner, {"op_name": pattern, **entry}


def _listed(given, where, other=""):
    """`(where, dict)` of every entry of a list of dicts, or of the only one."""
    several = isinstance(given, (list, tuple))
    for index, entry in enumerate(given if several else (given,)):
        path = f"{where}[{index}]" if several else where
        if isinstance(entry, (LayerSwap, OperatorSwap)):
            entry = vars(entry)
        if not isinstance(entry, dict):
            raise TypeError(f"{path}: {entry!r} should be a mapping with layers and backward_prefetch{other}")
        yield path, entry


def _check_keys(entry, known, where):
    for key in entry:
        if key not in known:
            raise ValueError(f"{where}.{key}: unknown key{nearest(key, known)}; known: {', '.join(known)}")


def _layers_and_prefetch(entry, where, default_prefetch):
    layers = layer_numbers(entry.get("layers", True), f"{where}.layers")
    if layers is None:
        raise ValueError(f"{where}.layers: {entry['layers']} means no layer: leave the entry out")
    prefetch = entry.get("backward_prefetch")
    return layers, _checked_prefetch(default_prefetch if prefetch is None else prefetch, f"{where}.backward_prefetch")


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


def _checked_prefetch(given, where):
    if type(given) is not int:
        raise TypeError(f"{where}: {given!r} should be a whole number of tensors")
    if given < 1:
        raise ValueError(f"{where}: {given} should be at least 1: tensors ahead of the one that is needed")
    return given


def _check_flag(given, where):
    if not isinstance(given, bool):
        raise TypeError(f"{where}: {given!r} should be true or false")


def _put(settings, **values):
    for name, value in values.items():
        object.__setattr__(settings, name, value)


def _shown(value):
    return list(value) if isinstance(value, tuple) else value
