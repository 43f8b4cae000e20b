"""Settings of recompute and swap: checked, and in one form. Pure Python.

Keys are those of MindSpore Transformers: `mp_comm_recompute` and `parallel_optimizer_comm_recompute` of its page
"Memory Optimization" (r1.9, `recompute_config`); `swap`, `default_prefetch`, `layer_swap` and `op_swap` of its page
"Fine-Grained Activations SWAP" (r1.5, `swap_config`); ranges of layers as texts of its page "Training Memory
Optimization" (r2.0). Layers are numbered in the whole model, as on the second page, not in a pipeline stage.
"""

from dataclasses import dataclass, field, fields
from numbers import Real
from typing import ClassVar

from mindformers_core.hints import nearest
from mindformers_core.ranges import check_range, parse_ranges
from mindformers_core.recompute.patterns import Pattern, parse_pattern
from mindformers_core.scopes import errors_at

PAGE = "docs/recompute.md"
# MindSpore Transformers swaps its flash_attention operators; here attention may be written in plain operators, too
DEFAULT_OP_SWAP = "*.self_attn"
LAYERS_FORMS = "true for all layers, a list of layer numbers, as [0, 3], or ranges of them, as '0-7' or '0,3,5-7'"
_FORMS = {
    "layer_swap": "[{layers: 0-3, backward_prefetch: 2}]",
    "op_swap": "{'*.mlp': true, '*.cast': {layers: 0-3, backward_prefetch: 2}} or [{op_name: '*.mlp', layers: 0-3}]",
}
_FLAG = "should be true or false"
_BUDGET = "has to be a number above 0 and at most 1: the part of the saved activations' bytes that may stay (1: all)"


def _as_given(default=None):
    """A field that the recipe loader passes on unchecked: this module checks its forms."""
    return field(default=default, metadata={"as_given": True})


@dataclass(frozen=True)
class Request:
    """What one entry of the settings asks for, in the form of all of them.

    Attributes:
        kind: `"recompute"`, `"exclude"` or `"swap"`.
        where: the key, for errors: `"recompute.select[1]"`.
        pattern: the `Pattern`; None: all Cells of the layers.
        layers: True for all, or the numbers of the layers in which it selects.
        backward_prefetch: see `LayerSwap`; of `"swap"` only.
    """

    kind: str
    where: str
    pattern: Pattern | None
    layers: bool | tuple[int, ...] = True
    backward_prefetch: int = 0


@dataclass(frozen=True)
class RecomputeSettings:
    """Settings of recompute: the activations that the backward pass recomputes. Checked and normalized when made.

    Attributes:
        full: fully recomputed layers: None, True (all entries of CellLists, CellDicts, and of SequentialCells with
            more than single Cells of MindSpore), or layer numbers in ascending order; accepts all forms of
            `layer_numbers`. False switches recompute off, whatever the flags below are.
        select: patterns of further operators or Cells to recompute; a single pattern needs no list.
        exclude: patterns of operators or Cells that are never recomputed; overrides all other keys.
        mp_comm_recompute: whether collectives of recomputed parts run again, as in `Cell.recompute`; if not, their
            results are saved.
        parallel_optimizer_comm_recompute: whether the gathered weights of a recomputed part (level 3 of `hsdp`) are
            freed after the forward pass and gathered again; False: kept until the backward pass, as at all other
            levels. None: `reshard_after_forward` of `hsdp` decides.
        budget: part of the saved bytes that may stay, above 0 and at most 1; recomputed instructions are selected
            accordingly. In place of `full` and `select`.

    Raises:
        TypeError, ValueError: other values, or keys that exclude each other; the message begins with the key.
    """

    switch: ClassVar[str] = "full"  # the key that `recompute: true` in a recipe stands for
    page: ClassVar[str] = PAGE

    full: bool | tuple[int, ...] | None = _as_given()
    select: tuple[str, ...] = _as_given(())
    exclude: tuple[str, ...] = _as_given(())
    mp_comm_recompute: bool = _as_given(True)
    parallel_optimizer_comm_recompute: bool | None = _as_given()
    budget: float | None = _as_given()

    def __post_init__(self):
        is_off = self.full is False and not self.select and self.budget is None
        vars(self)["full"] = False if is_off else layer_numbers(self.full, "full")  # frozen: no other way
        vars(self).update(select=_patterns(self.select, "select"), exclude=_patterns(self.exclude, "exclude"))
        _check_type(self.mp_comm_recompute, bool, "mp_comm_recompute", _FLAG)
        _check_type(self.parallel_optimizer_comm_recompute, bool | None, "parallel_optimizer_comm_recompute", _FLAG)
        if self.budget is not None:
            _check_type(self.budget, Real, "budget", _BUDGET)
            if not 0 < self.budget <= 1:
                raise ValueError(f"budget: {self.budget!r} {_BUDGET}")
        for name in ("full", "select") if self.budget is not None else ():
            if getattr(self, name):
                raise ValueError(
                    f"budget: {self.budget} chooses what is recomputed, but {name} says it, too ({self.shown(name)}): "
                    "give one of the two; exclude can stand beside either"
                )
        for name in ("exclude", "mp_comm_recompute", "parallel_optimizer_comm_recompute"):
            if getattr(self, name) not in ((), None, True) and not self.is_on and self.full is not False:
                raise ValueError(
                    f"{name}: {self.shown(name)} is about what is recomputed, but nothing is: give full, select or "
                    "budget, or leave it out"
                )

    def shown(self, name):
        """What was given for a key, for errors."""
        given = getattr(self, name)
        return list(given) if isinstance(given, tuple) else given

    @property
    def requests(self):
        """The `Request`s of `full`, `select` and `exclude`, a list."""
        full = [Request("recompute", "recompute.full", None, self.full)] if self.full else []
        select = [Request("recompute", *each) for each in _parsed(self.select, "recompute.select")]
        return [*full, *select, *(Request("exclude", *each) for each in _parsed(self.exclude, "recompute.exclude"))]

    @property
    def is_on(self):
        """Whether recompute is on."""
        return bool(self.full or self.select or self.budget is not None)


@dataclass(frozen=True)
class LayerSwap:
    """Layers whose saved tensors are all swapped to the host.

    Attributes:
        layers: True for all, or layer numbers in ascending order.
        backward_prefetch: number of saved tensors between the copy back and the use of a tensor.
    """

    layers: bool | tuple[int, ...]
    backward_prefetch: int


@dataclass(frozen=True)
class OperatorSwap:
    """Operators, or Cells, whose saved tensors are all swapped to the host.

    Attributes:
        op_name: their pattern.
        layers: True for all, or numbers of the layers with matches, in ascending order.
        backward_prefetch: number of saved tensors between the copy back and the use of a tensor.
    """

    op_name: str
    layers: bool | tuple[int, ...]
    backward_prefetch: int


@dataclass(frozen=True)
class SwapSettings:
    """Settings of swap: activations that stay on the host until the backward pass. Checked and normalized when made.

    Attributes:
        swap: whether swapping is on; default: with `layer_swap` or `op_swap`. True with neither of them: attention of
            all layers, `DEFAULT_OP_SWAP`. False: off, whatever the other keys are.
        default_prefetch: default of `backward_prefetch`: number of saved tensors between the copy back and the use of
            a tensor. (In MindSpore Transformers it belongs to the default operators alone.) A larger number hides
            the copies better and needs more memory.
        layer_swap: `LayerSwap`s; given as a list of dicts of `layers`, in a form of `layer_numbers`, and
            `backward_prefetch`.
        op_swap: `OperatorSwap`s; given as a list of such dicts with `op_name`, or as a dict from pattern to such a
            dict or True. Without `layers` an entry selects in all layers. The last entry with a match overrides.
        is_short: whether `swap: true` was the only setting.

    Raises:
        TypeError, ValueError: other values; the message begins with the key.
    """

    switch: ClassVar[str] = "swap"  # the key that `swap: true` in a recipe stands for
    page: ClassVar[str] = PAGE

    swap: bool | None = _as_given()
    default_prefetch: int = _as_given(1)
    layer_swap: tuple[LayerSwap, ...] = _as_given(())
    op_swap: tuple[OperatorSwap, ...] = _as_given(())

    def __post_init__(self):
        prefetch = _prefetch(self.default_prefetch, "default_prefetch")
        _check_type(self.swap, bool | None, "swap", _FLAG)
        layers = _swaps(LayerSwap, self.layer_swap, "layer_swap", prefetch)
        operators = _swaps(OperatorSwap, self.op_swap, "op_swap", prefetch)
        if self.swap is None and not layers and not operators and prefetch != 1:
            raise ValueError(
                f"default_prefetch: {prefetch} is given, but nothing to swap: give swap=true, layer_swap or op_swap"
            )
        is_short = bool(self.swap and not layers and not operators)
        if is_short:
            operators = (OperatorSwap(DEFAULT_OP_SWAP, True, prefetch),)
        is_on = bool(layers or operators) if self.swap is None else self.swap
        vars(self).update(swap=is_on, layer_swap=layers, op_swap=operators, is_short=is_short)

    @property
    def is_on(self):
        """Whether swapping is on."""
        return self.swap

    @property
    def requests(self):
        """The `Request`s of `layer_swap` and `op_swap`, a list; none where it is off."""
        where = "swap.swap: true, which means op_swap" if self.is_short else "swap.op_swap"
        asked = [(f"swap.layer_swap[{place}]", None, entry) for place, entry in enumerate(self.layer_swap)]
        asked += [(f"{where}[{e.op_name!r}]", parse_pattern(e.op_name, where), e) for e in self.op_swap]
        return [Request("swap", *named, e.layers, e.backward_prefetch) for *named, e in asked if self.is_on]


def check_compilable(settings, swapping):
    """Raise `ValueError` for settings beyond compiled functions, which recompute whole Cells only."""
    asked = {
        "recompute.budget": settings.budget is not None,
        "recompute.mp_comm_recompute: false": settings.is_on and not settings.mp_comm_recompute,
        "swap": swapping.is_on,
    }
    for wrong in [key for key in asked if asked[key]]:
        raise ValueError(
            f"{wrong}: compiled functions can only recompute whole Cells: use recompute.full, or recompute.select with "
            f"patterns of Cells, or run in PyNative (recipe: context.mode: 1)"
        )


def check_gathers(settings, gathers, wanted, instead):
    """Raise `ValueError` if a setting requests gathering weights again and no weights are gathered.

    False is allowed: weights that aren't gathered stay.

    Args:
        settings: the `RecomputeSettings`.
        gathers: whether weights are gathered: level 3 of `hsdp()`.
        wanted: the setting that gathers weights: `"parallelism.zero_level=3"`.
        instead: the given setting: `"zero_level is 2"`.
    """
    if settings.is_on and settings.parallel_optimizer_comm_recompute and not gathers:
        raise ValueError(
            "recompute.parallel_optimizer_comm_recompute: True is about the gathered weights of "
            f"{wanted}, but {instead}: leave it out, or use {wanted}"
        )


def layer_numbers(given, where):
    """The selected layers, numbered from 0 in the whole model.

    Args:
        given: None or False: none; True: all; a text of numbers and ranges, ends included, as "0,3,5-7"; or a list of
            numbers and such texts. A list of numbers must ascend: in MindSpore Transformers a list in another order
            has the number of layers of each pipeline stage.
        where: the key, for errors.

    Returns:
        None, True, or a tuple of at least one int in ascending order.

    Raises:
        TypeError, ValueError: other values, or a duplicate layer; the message begins with `where`.
    """
    if given is None or isinstance(given, bool):
        return given or None
    parts = [given] if isinstance(given, str) else given
    if not isinstance(parts, (list, tuple)) or not all(type(part) in (int, str) for part in parts):
        raise TypeError(f"{where}: {given!r} should be {LAYERS_FORMS}")
    with errors_at(f"{where}: ", f": give {LAYERS_FORMS}"):
        numbers = [number for part in parts for number in parse_ranges(str(part))]
    if not numbers:
        raise ValueError(f"{where}: {given!r} has no layer in it: give {LAYERS_FORMS}, or leave it out")
    if len(numbers) != len(set(numbers)):
        raise ValueError(f"{where}: {given!r} gives a layer twice")
    if list(parts) == numbers != sorted(numbers):
        raise ValueError(
            f"{where}: {given!r} should be in ascending order, {sorted(numbers)}: these are numbers of layers of the "
            "whole model, not how many layers each pipeline stage has"
        )
    return tuple(sorted(numbers))


def _patterns(given, where):
    """One pattern or several, as a tuple; `stages` checks their matches."""
    texts = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(texts, (list, tuple)):
        raise TypeError(f"{where}: {given!r} should be a pattern, or a list of patterns, as ['layers.0-7.mlp']")
    _parsed(texts, where)
    return tuple(texts)


def _parsed(texts, where):
    """`(where, Pattern)` for every text."""
    places = [where] if len(texts) == 1 else [f"{where}[{place}]" for place in range(len(texts))]
    return [(place, parse_pattern(text, place)) for text, place in zip(texts, places)]


def _swaps(kind, given, key, default_prefetch):
    """The entries of `layer_swap` or `op_swap`, a tuple of `kind`; what settings have made of an entry is taken again.

    The first field of `kind` has no default.
    """
    form = f"given as {_FORMS[key]}"
    if isinstance(given, dict) and kind is OperatorSwap:
        named = [(f"{key}[{name!r}]", {"op_name": name}, {} if e is True else e) for name, e in given.items()]
    elif isinstance(given, (list, tuple, type(None))):
        entries = enumerate(vars(entry) if isinstance(entry, kind) else entry for entry in given or ())
        named = [(f"{key}[{place}]", {}, entry) for place, entry in entries]
    else:
        raise TypeError(f"{key}: {given!r} should be {form}")
    found = []
    for where, name, entry in named:
        needed, *known = [each.name for each in fields(kind)]
        known = known if name else [needed, *known]
        if not isinstance(entry, dict):
            raise TypeError(f"{where}: {entry!r} should be a mapping with {', '.join(known)}; {key} is {form}")
        for other in entry:
            if other not in known:
                raise ValueError(f"{where}.{other}: unknown key{nearest(other, known)}; {key} is {form}")
        entry = name | entry
        if needed not in entry:
            raise ValueError(f"{where}.{needed}: missing; {key} is {form}")
        if kind is OperatorSwap:
            parse_pattern(entry["op_name"], f"{where}.op_name")
        layers, prefetch = layer_numbers(entry.get("layers", True), f"{where}.layers"), entry.get("backward_prefetch")
        if layers is None:
            raise ValueError(f"{where}.layers: {entry['layers']} means no layer: leave the entry out")
        prefetch = _prefetch(default_prefetch if prefetch is None else prefetch, f"{where}.backward_prefetch")
        found.append(kind(**{**entry, "layers": layers, "backward_prefetch": prefetch}))
    return tuple(found)


def _prefetch(given, where):
    _check_type(given, int, where, "should be a whole number of tensors")
    check_range(given, {"at_least": 1, "at_most": 10**6}, where)
    return given


def _check_type(given, kind, where, allowed):
    """Raise `TypeError` for another type, which says what is `allowed`."""
    if not isinstance(given, kind) or (isinstance(given, bool) and kind in (int, Real)):  # a bool is no number
        raise TypeError(f"{where}: {given!r} ({type(given).__name__}) {allowed}")
