"""Settings of optimizers by name, and what they say of each parameter: rate, decay, frozen or not. Pure Python."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

from mindformers_core.grouping import grouped
from mindformers_core.hints import any_layer, first_of
from mindformers_core.ranges import bounded


@dataclass(frozen=True)
class ParameterGroup:
    """What is said of the parameters whose names match; of several groups the last one that says it."""

    parameters: tuple[str, ...]  # patterns of names, as '*.embed_tokens.*'
    learning_rate_factor: float | None = bounded(None, 0.0, 1e6)  # of the learning rate of every step; else 1
    weight_decay: float | None = bounded(None, 0.0, 100)  # whatever weight_decay_exclude and _vectors say
    frozen: bool | None = None  # true: not trained; false: trained, also beneath adapters


@dataclass(frozen=True)
class Placed:
    """What an optimizer does with a parameter."""

    rate: float = 1.0
    decay: float = 0.0
    frozen: bool | None = None  # None: as the model says


@dataclass(frozen=True)
class OptimizerSettings:
    """What every optimizer has."""

    type: str = ""
    groups: tuple[ParameterGroup, ...] = ()  # other rates, decays or none, by patterns of names, see optimizers.md
    page: ClassVar = "docs/optimizers.md"
    state_bytes: ClassVar = 8  # of an element, for a dry run: two float32 moments; so are those of import paths taken

    def __post_init__(self):
        for index, group in enumerate(self.groups):
            if group.weight_decay is not None and not hasattr(self, "weight_decay"):
                raise ValueError(f"groups[{index}].weight_decay: {self.type} takes no weight_decay: leave it out")

    def placed(self, name, dims):
        """The `Placed` of a parameter, by its name and the number of dims of the whole."""
        decay = getattr(self, "weight_decay", 0.0) if self._decays(name, dims) else 0.0
        rate, frozen = 1.0, None
        for group in self.groups:
            if any(fnmatchcase(name, pattern) for pattern in group.parameters):
                rate = rate if group.learning_rate_factor is None else group.learning_rate_factor
                decay = decay if group.weight_decay is None else group.weight_decay
                frozen = frozen if group.frozen is None else group.frozen
        return Placed(rate, decay, frozen)

    def _decays(self, name, dims):
        excluded = any(fnmatchcase(name, pattern) for pattern in getattr(self, "weight_decay_exclude", ()))
        return not excluded and (dims > 1 or getattr(self, "weight_decay_vectors", True))


@dataclass(frozen=True)
class DecaySettings(OptimizerSettings):
    """What optimizers with weight decay have."""

    weight_decay: float = bounded(0.01, 0.0, 100)
    weight_decay_exclude: tuple[str, ...] = ("*norm*", "*bias*")  # patterns of parameter names that don't decay
    weight_decay_vectors: bool = False  # whether tensors of one dim (scales of norms, biases) and scalars decay, too


@dataclass(frozen=True)
class AdamWSettings(DecaySettings):
    """AdamW (Loshchilov and Hutter 2019), with bias correction."""

    type: Literal["AdamW"] = "AdamW"
    betas: tuple[float, float] = bounded((0.9, 0.95), 0, below=1)
    eps: float = bounded(1e-8, 0.0, 1)
    component: ClassVar = "mindformers_core.optimizers.adamw:AdamW"


@dataclass(frozen=True)
class LambSettings(DecaySettings):
    """LAMB (You et al. 2020): steps as large as the whole weight's norm."""

    type: Literal["Lamb"] = "Lamb"
    beta1: float = bounded(0.9, above=0.0, below=1.0)
    beta2: float = bounded(0.999, above=0.0, below=1.0)
    eps: float = bounded(1e-6, above=0.0, at_most=1)
    component: ClassVar = "mindformers_core.optimizers.lamb:Lamb"


@dataclass(frozen=True)
class SgdSettings(DecaySettings):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013); weight decay is added to the gradient."""

    type: Literal["SGD"] = "SGD"
    momentum: float = bounded(0.9, 0.0, below=1.0)
    nesterov: bool = False
    state_bytes: ClassVar = 4
    component: ClassVar = "mindformers_core.optimizers.sgd:SGD"


@dataclass(frozen=True)
class LarsSettings(DecaySettings):
    """LARS (You et al. 2017): momentum, steps as large as a share of the whole weight's norm."""

    type: Literal["LARS"] = "LARS"
    momentum: float = bounded(0.9, 0.0, below=1.0)
    trust: float = bounded(0.001, above=0.0, at_most=1e6)  # that share
    state_bytes: ClassVar = 4
    component: ClassVar = "mindformers_core.optimizers.lars:LARS"


@dataclass(frozen=True)
class MuonSettings(DecaySettings):
    """Muon (Jordan et al. 2024, Liu et al. 2025) for whole matrices, AdamW for all other parameters."""

    type: Literal["Muon"] = "Muon"
    momentum: float = bounded(0.95, 0.0, below=1.0)
    nesterov: bool = True
    iterations: int = bounded(5, 1, 100)  # of Newton and Schulz
    rms: float = bounded(0.2, above=0.0, at_most=1e6)  # root mean square of a step; AdamW's is about 0.2 to 0.4
    adamw_parameters: tuple[str, ...] = ("*embed*", "*lm_head*")  # patterns of matrices that AdamW updates
    betas: tuple[float, float] = bounded((0.9, 0.95), 0, below=1)  # of AdamW
    eps: float = bounded(1e-8, 0.0, 1)  # of AdamW
    component: ClassVar = "mindformers_core.optimizers.muon:Muon"


OPTIMIZERS = {kind.type: kind for kind in (AdamWSettings, LambSettings, SgdSettings, LarsSettings, MuonSettings)}


def optimizer_base(names):
    """The dataclass of the keys that a user's optimizer has besides its own settings, of these names."""
    return DecaySettings if "weight_decay" in names else OptimizerSettings


def placed_lines(placed, settings):
    """A line on the parameters that decay, one on the others, and one on each other rate and on what is frozen.

    Args:
        placed: name -> `Placed` of all parameters.
        settings: the `OptimizerSettings`.
    """
    decays = {Placed(decay=getattr(settings, "weight_decay", 0.0)): [], Placed(): []}
    decays |= grouped(
        (Placed(frozen=True) if each.frozen else Placed(each.rate, each.decay), name) for name, each in placed.items()
    )
    lines = []
    for each, names in decays.items():
        head = "frozen" if each.frozen else f"decay {each.decay:g}" if each.decay else "no decay"
        kinds = list(dict.fromkeys(map(any_layer, names)))
        rate = f", rate x {each.rate:g}" if each.rate != 1.0 else ""
        lines.append(f"{head:<11} {len(names)} weights{rate}: {first_of(kinds, 5)}")
    return lines
