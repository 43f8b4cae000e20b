"""Specs of models, layers and parts of a model: `ModelSpec`s by name, and those of users. Pure Python."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import signature
from types import MappingProxyType

from mindformers_core.hints import check_loss, nearest
from mindformers_core.lazy_exports import import_object
from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.operators.signature import tensor_meta


@dataclass(frozen=True)
class ModuleSpec:
    """The class of a decoder layer, or of a part of one, and those of its parts, so that a user can replace them.

    Attributes:
        module: the class, of which `build_module` makes the Cell.
        submodules: classes, or their specs, by argument name.
    """

    module: type
    submodules: dict = field(default_factory=dict)


def build_module(spec, *args, **kwargs):
    """The Cell of a `ModuleSpec`, or of a class: `module(*args, **kwargs, **submodules)` (the name is Megatron-LM's).

    `model_comm_pgs` and `vp_stage` are left out for a class without such parameters: here, a mesh says which ranks
    communicate, and a `LayerRange` which layers a stage has.
    """
    module, submodules = (spec.module, spec.submodules) if isinstance(spec, ModuleSpec) else (spec, {})
    left_out = {"model_comm_pgs", "vp_stage"} - signature(module.__init__).parameters.keys()
    kwargs = {name: value for name, value in kwargs.items() if name not in left_out}
    return module(*args, **kwargs, **submodules)


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


@dataclass(frozen=True)
class HuggingFaceFormat:
    """The names that Hugging Face's `transformers` has for a model, its config and its tensors.

    Attributes:
        model_type, architecture: as `config.json` has them.
        keys: names of the fields of our config that are keys of `config.json` as well.
        fixed: further keys of `config.json` -> the values that our model computes with; None stands for a missing key.
        tensor_name: function of the path of a parameter that returns the name of its tensor.
        ignored: patterns of names of tensors that old files have, and that are no parameters.
        tied_copies: those of tensors that files may have beside tied parameters; `transformers` ignores them, too.
    """

    model_type: str
    architecture: str
    keys: tuple
    fixed: dict = field(default_factory=dict, hash=False)
    tensor_name: Callable = lambda path: path
    ignored: tuple = ()
    tied_copies: tuple = ()


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
            next, for `batch` samples of `length` positions. Pipelines need it: `cell(config, layers=LayerRange)` builds
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


def _llama_divided(config):
    layers = [config.get_config_for_layer(number) for number in range(1, config.num_hidden_layers + 1)]
    keys = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return list(dict.fromkeys((key, getattr(layer, key)) for layer in layers for key in keys))


_LLAMA_FORMAT = HuggingFaceFormat(
    "llama",
    "LlamaForCausalLM",
    (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
        "rope_scaling", "tie_word_embeddings", "attention_dropout", "initializer_range", "heterogeneous_block_specs",
    ),
    {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
        "quantization_config": None,
    },
    ignored=("*.rotary_emb.inv_freq",),
    tied_copies=("lm_head.weight",),
)  # fmt: skip
DEFAULT_MODEL = "llama"
MODELS = MappingProxyType(
    {
        DEFAULT_MODEL: ModelSpec(
            "mindformers_core.models.llama:llama_for_training",
            LlamaConfig,
            loss="sum",
            ignored={"labels": -100},
            inputs=("input_ids", "labels", "positions", "places"),
            boundary=lambda config, batch, length: tensor_meta((batch, length, config.hidden_size), config.dtype),
            tied=lambda config: ("model.embed_tokens.weight",) if config.tie_word_embeddings else (),
            divided=_llama_divided,
            hugging_face=_LLAMA_FORMAT,
        )
    }
)


def model_spec(name):
    """The `ModelSpec` of a name.

    Args:
        name: a key of `MODELS`, or "package.module:NAME" of a `ModelSpec`, or of a Cell's class with the attribute
            `config_class`, the dataclass of its config.

    Raises:
        TypeError: not a text, or the import path of something else. ValueError: no such name, module or attribute.
    """
    if not isinstance(name, str):
        raise TypeError(f"{name!r} should be a text: {', '.join(MODELS)}, or package.module:Class")
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        known = ", ".join(MODELS)
        raise ValueError(f"no model is called {name!r}{nearest(name, MODELS)}: {known}, or package.module:Class")
    found = import_object(name, "model")
    if not isinstance(found, ModelSpec):
        if not isinstance(found, type) or not is_dataclass(getattr(found, "config_class", None)):
            raise TypeError(
                f"{name} is {found!r}: it should be a ModelSpec, or a class with config_class = a dataclass"
            )
        found = ModelSpec(found, found.config_class)
    if "name" in (entry.name for entry in fields(found.config)):
        raise ValueError(f"{name}: its config has a field 'name', which in a recipe is that of the model: rename it")
    return found
