"""What is computed again, and what is kept on the host, as it was asked for, checked. Pure Python.

Keys are those of MindSpore Transformers: `mp_comm_recompute` and `parallel_optimizer_comm_recompute` of its page
"Memory Optimization" (r1.9, `recompute_config`); `swap`, `default_prefetch`, `layer_swap` and `op_swap` of its page
"Fine-Grained Activations SWAP" (r1.5, `swap_config`); ranges of layers as texts of its page "Training Memory
Optimization" (r2.0). Numbers of layers say which ones of the whole model, as the second page has it, not how many of
every pipeline stage.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from mindformers_core.recompute.layers import layer_numbers
from mindformers_core.recompute.setting_checks import check_budget, check_flag, checked_patterns, checked_prefetch
from mindformers_core.recompute.swap_entries import LayerSwap, OperatorSwap, layer_swaps, operator_swaps

__all__ = ["DEFAULT_OP_SWAP", "RecomputeSettings", "SwapSettings"]

# MindSpore Transformers swaps its flash_attention operators; here attention may be written in plain operators, too
DEFAULT_OP_SWAP = "*.self_attn"


def _as_given(default=None):
    """A field whose value a recipe's loader hands over as it is: its forms are checked here."""
    return field(default=default, metadata={"as_given": True})


@dataclass(frozen=True)
class RecomputeSettings:
    """What the backward pass computes again, from what it keeps. Checked, and in one form, when made.

    Attributes:
        full: layers that are recomputed wholly: None, True (all entries of CellLists, CellDicts, and SequentialCells
            with more in them than single Cells of MindSpore), or their numbers, in ascending order; given in any form
            that `layer_numbers` takes. False where all is switched off, whatever the flags below say.
        select: patterns of what else is recomputed, operators or Cells; one may be given without a list.
        exclude: patterns of what never is, whatever else says.
        mp_comm_recompute: whether collectives in what is recomputed run again, as in `Cell.recompute`; if not, their
            results are kept.
        parallel_optimizer_comm_recompute: whether weights that were gathered for a recomputed part (level 3 of `hsdp`)
            are dropped after forward and gathered again; False: kept until backward, as at all other levels. None: as
            `hsdp` was told with `reshard_after_forward`.
        budget: the part of the saved bytes that may be kept, more than 0 and at most 1: what is recomputed is chosen
            so. Instead of `full` and `select`.

    Raises:
        TypeError, ValueError: anything else, or keys that exclude each other; the message begins with the key.
    """

    switch: ClassVar[str] = "full"  # the key that `recompute: true` in a recipe stands for
    page: ClassVar[str] = "docs/recompute.md"

    full: bool | tuple[int, ...] | None = _as_given()
    select: tuple[str, ...] = _as_given(())
    exclude: tuple[str, ...] = _as_given(())
    mp_comm_recompute: bool = _as_given(True)
    parallel_optimizer_comm_recompute: bool | None = _as_given()
    budget: float | None = _as_given()

    def __post_init__(self):
        is_off = self.full is False and not self.select and self.budget is None
        _put(self, full=False if is_off else layer_numbers(self.full, "full"))
        _put(self, select=checked_patterns(self.select, "select"), exclude=checked_patterns(self.exclude, "exclude"))
        check_flag(self.mp_comm_recompute, "mp_comm_recompute")
        if self.parallel_optimizer_comm_recompute is not None:
            check_flag(self.parallel_optimizer_comm_recompute, "parallel_optimizer_comm_recompute")
        self._check_budget()
        self._check_about_something()

    def _check_about_something(self):
        if self.is_on or self.full is False:
            return
        if self.exclude:
            raise ValueError(
                f"exclude: {list(self.exclude)} is taken out of what is recomputed, but nothing is: give full, select "
                "or budget, or leave it out"
            )
        for name in ("mp_comm_recompute", "parallel_optimizer_comm_recompute"):
            if getattr(self, name) is False:
                raise ValueError(
                    f"{name}: False is about what is recomputed, but nothing is: give full, select or budget, or "
                    "leave it out"
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
            such a dict, or True. Without `layers` it counts in all.
        is_short: whether `swap: true` was all that was given.

    Raises:
        TypeError, ValueError: anything else, or layers with two values of `backward_prefetch`; the message begins with
            the key.
    """

    switch: ClassVar[str] = "swap"  # the key that `swap: true` in a recipe stands for
    page: ClassVar[str] = "docs/recompute.md"

    swap: bool | None = _as_given()
    default_prefetch: int = _as_given(1)
    layer_swap: tuple[LayerSwap, ...] = _as_given(())
    op_swap: tuple[OperatorSwap, ...] = _as_given(())

    def __post_init__(self):
        prefetch = checked_prefetch(self.default_prefetch, "default_prefetch")
        if self.swap is not None:
            check_flag(self.swap, "swap")
        layers, operators = layer_swaps(self.layer_swap, prefetch), operator_swaps(self.op_swap, prefetch)
        if self.swap is None and not layers and not operators and prefetch != 1:
            raise ValueError(
                f"default_prefetch: {prefetch} is given, but nothing to swap: give swap=true, layer_swap or op_swap"
            )
        is_short = False
        if self.swap and not layers and not operators:
            operators, is_short = (OperatorSwap(DEFAULT_OP_SWAP, True, prefetch),), True
        is_on = bool(layers or operators) if self.swap is None else self.swap
        _put(self, swap=is_on, layer_swap=layers, op_swap=operators, is_short=is_short)

    @property
    def is_on(self):
        """Whether anything is to be swapped."""
        return self.swap

    def where(self, entry):
        """What asks for an `OperatorSwap`, for errors: `"swap.op_swap['*.mlp']"`."""
        key = f"op_swap[{entry.op_name!r}]"
        return f"swap.swap: true, which means {key}" if self.is_short else f"swap.{key}"


def _put(settings, **values):
    for name, value in values.items():
        object.__setattr__(settings, name, value)


def _shown(value):
    return list(value) if isinstance(value, tuple) else value
