"""Specs of models, of their layers and parts, and of their tensors in files. Pure Python."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature

from mindformers_core.hints import check_loss
from mindformers_core.lazy_exports import import_object


@dataclass(frozen=True)
class ModuleSpec:
    """The class of a decoder layer, or of a part of one, and those of its parts, so that a user can replace them.

    Attributes:
        module: the class, of which `build_module` makes the Cell.
        submodules: classes, or their specs, by argument name.
    """

    module: type
    submodules: dict = field(default_factory=dict)


def build_module(spec, /, *args, **kwargs):
    """The Cell of a `ModuleSpec`, or of a class: `module(*args, **kwargs, **submodules)` (the name is Megatron-LM's).

    `model_comm_pgs`, `vp_stage` and `spec` are left out for a class without such parameters: here, a mesh says which
    ranks communicate, a `LayerRange` which layers a stage has, and a class of one's own what it is made of.
    """
    module, submodules = (spec.module, spec.submodules) if isinstance(spec, ModuleSpec) else (spec, {})
    left_out = {"model_comm_pgs", "vp_stage", "spec"} - signature(module.__init__).parameters.keys()
    kwargs = {name: value for name, value in kwargs.items() if name not in left_out}
    return module(*args, **kwargs, **submodules)


@dataclass(frozen=True)
class LayerSpec:
    """What a decoder layer is made of, beside the sizes that its config has.

    Attributes:
        attention: "grouped" (`GroupedAttention`) or "latent" (`LatentAttention`).
        mlp: "gated" (`GatedMLP`), "plain" (`PlainMLP`) or "experts" (`SparseMLP`).
        norm: "rms" (`RMSNorm`) or "layer" (`LayerNorm`).
        norm_eps: of these.
        head_norms: whether queries and keys are normed, each head by itself.
        query_bias, output_bias, mlp_bias: whether the projections to queries, keys and values, the one behind
            attention, and those of the feed-forward block have a bias.
        router: fields of the `RouterConfig` of experts, a dict.
        expert_size, shared_size: inside an expert, and inside what all tokens go through; 0: there is nothing such.
        capacity: as of `experts`.
    """

    attention: str = "grouped"
    mlp: str = "gated"
    norm: str = "rms"
    norm_eps: float = 1e-6
    head_norms: bool = False
    query_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    router: dict | None = field(default=None, hash=False)
    expert_size: int = 0
    shared_size: int = 0
    capacity: tuple | None = None


def routed_layers(config):
    """Numbers of a model's decoder layers with experts, from 1, those of its prediction heads last; how many experts
    each has; and how many numbers each tells: its router's loss, counts of choices of experts, and where these have a
    capacity, of those dropped."""
    last = config.num_hidden_layers + config.num_nextn_predict_layers
    specs = {number: config.layer_spec(number) for number in range(1, last + 1)}
    routed = {number: spec for number, spec in specs.items() if spec.mlp == "experts"}
    experts = max((spec.router["num_experts"] for spec in routed.values()), default=0)
    return tuple(routed), experts, 1 + experts + any(spec.capacity for spec in routed.values())


@dataclass(frozen=True)
class LayerRange:
    """Consecutive decoder layers of a model: all of them, or those of a pipeline stage.

    Attributes:
        offset: number of decoder layers of the whole model before these.
        count: number of these; the first and the last part of a model may have none.
        is_first, is_last: whether this is the part with the embedding, and the part with the output layer.
    """

    offset: int
    count: int
    is_first: bool = True
    is_last: bool = True


EACH = "#"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of files that has a Parameter, or a part of it.

    Attributes:
        name: each `*` stands for what one of the pattern of the Parameter's path stands for.
        index: of the Parameter's first dims, those that the file tensor doesn't have: a number, or `EACH`: there is one
            file tensor for each, whose name has the number at `#`, as of experts; None: it has the dim.
        dim: that of the Parameter whose indices are rows here.
        rows: (start, stop) of the Parameter's rows that it has; None: all.
        at: (start, count): the row of the file tensor with the first of these, and its number of rows, where it has
            those of other Parameters, too, as a fused projection; None: it has no others.
        transposed: whether the last two dims are swapped in the file.
    """

    name: str
    index: tuple = ()
    dim: int = 0
    rows: tuple | None = None
    at: tuple | None = None
    transposed: bool = False

    @property
    def is_whole(self):
        """Whether it equals the Parameter."""
        return self.rows is None and self.at is None and not (self.transposed or self.index)


@dataclass(frozen=True)
class HuggingFaceFormat:
    """The names that Hugging Face's `transformers` has for a model, its config and its tensors.

    Attributes:
        model_type, architecture: as `config.json` has them.
        keys: names of the fields of our config that are keys of `config.json` as well.
        aliases: those of them that have other names there -> these.
        fixed: further keys of `config.json` -> the values that our model computes with; None stands for a missing key.
        written: keys of `config.json` that are written and never compared, as rates of dropout, which we don't apply.
        tensor_map: function of the config that returns pairs (pattern of paths of parameters, their `FileTensor`s); a
            parameter that no pattern matches is a tensor of its path.
        ignored: patterns of names of tensors that old files have, and that are no parameters.
        kept: patterns of names of tensors that stay in their dtype where others are converted.
    """

    model_type: str
    architecture: str
    keys: tuple
    aliases: dict = field(default_factory=dict, hash=False)
    fixed: dict = field(default_factory=dict, hash=False)
    written: dict = field(default_factory=dict, hash=False)
    tensor_map: Callable = lambda config: ()
    ignored: tuple = ()
    kept: tuple = ()


@dataclass(frozen=True)
class ModelSpec:
    """A model that a recipe can name (the term is torchtitan's).

    Attributes:
        cell: class of the model, or its import path, "package.module:Class". `cell(config)` builds the model on the
            meta device. The model takes the arrays of a batch, and returns the loss.
        config: dataclass of the recipe's section `model`; the key `model.KEY` is its field KEY.
        loss: `"sum"`: the model returns the sum of its labels' losses and the number of labels that count, so that each
            weighs alike in a step, wherever it lies. `"mean"` (default): it returns a mean, alone or first, and every
            micro-batch weighs alike: right where all samples do.
        inputs: names of the arguments of `construct`, in the order of the arrays of the dataset, of which there may be
            fewer. Only pipelines and `ignored` need them: the first array is passed from stage to stage, the others to
            each stage by name.
        boundary: `boundary(config, batch, length)` is the `TensorMeta` of the whole tensor that a stage sends to the
            next, for `batch` samples of `length` positions, or a tuple of several, which are its first arguments; the
            first is computed in `precision.compute`. Pipelines need it: `cell(config, layers=LayerRange)` builds
            a stage, and the config has `num_hidden_layers`. None: the model can't be a pipeline.
        tied: `tied(config)` returns the paths of the parameters that the first and the last stage share.
        divided: `divided(config)` is a list of `(key, size)`, sizes that `tensor_parallel` has to divide.
        hugging_face: the `HuggingFaceFormat` of its checkpoints. None: tensors have the names of parameters, and
            `config.json` the keys of the config.
        ignored: name of an input -> the value with which a row of it counts no label, as `{"labels": -100}`: with
            loss="sum", ranks and micro-batches may then have different numbers of samples, see `BatchPlan`.
    """

    cell: object
    config: type
    loss: str = "mean"
    inputs: tuple = ()
    boundary: Callable | None = None
    tied: Callable = lambda config: ()
    divided: Callable = lambda config: ()
    hugging_face: HuggingFaceFormat | None = None
    ignored: dict = field(default_factory=dict, hash=False)

    def __post_init__(self):
        check_loss(self.loss, "ModelSpec")
        if self.ignored and (self.loss == "mean" or not self.ignored.keys() <= set(self.inputs)):
            raise ValueError(f'ModelSpec.ignored: {self.ignored} needs loss="sum", and names of inputs {self.inputs}')
        for name in ("boundary", "tied", "divided"):
            if not callable(value := getattr(self, name)) and value is not None:
                raise TypeError(f"ModelSpec.{name}: {value!r} should be a function, as {name}=lambda config: …")

    def build(self, config, layers=None):
        """The Cell of a config, or its stage with these `layers`, a `LayerRange`."""
        cell = import_object(self.cell, "model") if isinstance(self.cell, str) else self.cell
        return cell(config) if layers is None else cell(config, layers=layers)
