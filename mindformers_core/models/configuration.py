"""The numbers that define a Llama-style model, named as in Hugging Face's `config.json`. Pure Python."""

from dataclasses import dataclass, field, replace

from mindformers_core.hints import nearest
from mindformers_core.models.rope_scaling import RopeScaling, rope_scaling_of
from mindformers_core.models.spec import LayerSpec
from mindformers_core.ranges import bounded, check_fields
from mindformers_core.scopes import errors_at

MOST_LAYERS = 10_000  # more are a mistyped number
_DTYPES = ("float32", "float16", "bfloat16")
# values that can differ between layers; hidden states, rotary tables and dtype are those of the whole model
_LAYER_KEYS = (
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "initializer_range", "fp8",
)  # fmt: skip


@dataclass(frozen=True)
class LlamaConfig:
    """Configuration of a Llama-style decoder.

    Attributes:
        vocab_size: number of token ids.
        hidden_size: size of the residual stream.
        intermediate_size: size inside the feed-forward block.
        num_hidden_layers: number of decoder layers of the whole model.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads; default: as many as query heads.
        head_dim: size of one head; default: `hidden_size / num_attention_heads`.
        max_position_embeddings: longest sequence.
        rms_norm_eps: added to the mean square in the norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: a `RopeScaling` of the rotary frequencies, or the dict of its keys. Default: not scaled.
        tie_word_embeddings: whether the output layer uses the embedding's weight. The first and the last stage of a
            pipeline both have this weight, under the same path: its gradient is the sum of both.
        attention_dropout: the probability with which a weight of attention is 0 in training.
        initializer_range: standard deviation of the initial weights.
        dtype: of parameters and computation: float32, float16 or bfloat16.
        account_for_embedding_in_pipeline_split: whether the embedding counts as a layer in a split into equal stages.
        account_for_loss_in_pipeline_split: whether the output layer counts as a layer in such a split.
        heterogeneous_block_specs: for every decoder layer a dict with the values that differ from the model's, of
            `intermediate_size`, `num_attention_heads`, `num_key_value_heads`, `rms_norm_eps`, `initializer_range` and
            `fp8`. The size of a head, `head_dim`, is common. Default: all layers are equal.
        fp8: whether linear layers of decoder layers multiply numbers rounded to float8, and how: "e4m3", "hybrid" (e5m2
            for gradients), or the import path of an `Fp8Policy`. Default: not at all. See `get_fp8_context`.
        first_last_layers_bf16: whether the first `num_layers_at_start_in_bf16` and the last `num_layers_at_end_in_bf16`
            decoder layers multiply in `dtype` in any case.

    Raises:
        TypeError, ValueError: a value of the wrong type, out of range, or in contradiction to another one.
    """

    vocab_size: int = bounded(32000, 1, 2**24)
    hidden_size: int = bounded(4096, 1, 2**20)
    intermediate_size: int = bounded(11008, 1, 2**22)
    num_hidden_layers: int = bounded(32, 1, MOST_LAYERS)
    num_attention_heads: int = bounded(32, 1, 2**14)
    num_key_value_heads: int | None = bounded(None, 1, 2**14)
    head_dim: int | None = bounded(None, 1, 2**14)
    max_position_embeddings: int = bounded(2048, 1, 2**24)
    rms_norm_eps: float = bounded(1e-6, above=0, at_most=1)
    rope_theta: float = bounded(10000.0, above=0, at_most=1e12)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_dropout: float = bounded(0.0, 0, below=1)
    initializer_range: float = bounded(0.02, above=0, at_most=100)
    dtype: str = "float32"
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    heterogeneous_block_specs: tuple[dict, ...] | None = field(default=None, hash=False)
    fp8: str | None = None
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = bounded(1, 0, MOST_LAYERS)
    num_layers_at_end_in_bf16: int = bounded(1, 0, MOST_LAYERS)

    def __post_init__(self):
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        check_fields(self)
        check_dtype(self.dtype)
        if self.head_dim is None:
            check_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        check_divides("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} should be even: rotary embedding turns pairs of values")
        if self.rope_scaling is not None:
            self._complete_rope_scaling()
        if self.heterogeneous_block_specs is not None:
            self._check_block_specs()

    divided_keys = "num_attention_heads", "key_value_size", "intermediate_size"  # by tensor_parallel
    learns_positions, num_nextn_predict_layers = False, 0

    @property
    def key_value_size(self):
        """Size of all key heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def rotary_size(self):
        """Size of the part of a head that rotary positions turn; 0: there are none."""
        return self.head_dim

    def layer_spec(self, layer_number):
        """The `LayerSpec` of the decoder layer with this number in the whole model, from 1."""
        return LayerSpec(norm_eps=self.rms_norm_eps)

    def _complete_rope_scaling(self):
        if not isinstance(self.rope_scaling, (RopeScaling, dict)):
            raise TypeError(f"rope_scaling: expected a dict by key, not {self.rope_scaling!r}")
        with errors_at("rope_scaling."):
            scaling = rope_scaling_of(self.rope_scaling)
            scaling = scaling.of_model(self.max_position_embeddings, self.rotary_size, self.rope_theta)
        object.__setattr__(self, "rope_scaling", scaling)

    def _check_block_specs(self):
        specs = self.heterogeneous_block_specs
        if not isinstance(specs, (list, tuple)):
            raise TypeError(f"heterogeneous_block_specs: expected a list of dicts, not {specs!r}")
        if len(specs) != self.num_hidden_layers:
            raise ValueError(
                f"heterogeneous_block_specs: {len(specs)} entries, but num_hidden_layers is {self.num_hidden_layers}: "
                "give a dict for every layer, {} where nothing differs"
            )
        for index, spec in enumerate(specs):
            where = f"heterogeneous_block_specs[{index}]"
            if not isinstance(spec, dict):
                raise TypeError(f"{where}: expected a dict by key, not {spec!r}")
            for key in spec:
                if key not in _LAYER_KEYS:
                    hint, allowed = nearest(key, _LAYER_KEYS), ", ".join(_LAYER_KEYS)
                    raise ValueError(f"{where}: unknown key '{key}'{hint}; a layer's own are: {allowed}")
        object.__setattr__(self, "heterogeneous_block_specs", tuple(dict(spec) for spec in specs))
        for number in range(1, len(specs) + 1):
            self.get_config_for_layer(number)

    def get_config_for_layer(self, global_layer_number):
        """The config of the decoder layer with this number in the whole model, from 1 (RFC ICY7S6).

        Raises:
            ValueError: no such layer.
        """
        check_layer_number(self, global_layer_number)
        if self.heterogeneous_block_specs is None:
            return self
        index = global_layer_number - 1
        with errors_at(f"heterogeneous_block_specs[{index}]: "):
            return replace(self, heterogeneous_block_specs=None, **self.heterogeneous_block_specs[index])


def check_dtype(dtype):
    """Raise `ValueError` for what is no dtype of a model."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: {dtype!r} should be one of {', '.join(_DTYPES)}{nearest(dtype, _DTYPES)}")


def check_layer_number(config, number):
    """Raise `ValueError` where a config has no layer of this number, from 1."""
    if not 1 <= number <= config.num_hidden_layers:
        raise ValueError(f"layer number {number} should be from 1 to {config.num_hidden_layers}")


def check_divides(name, value, divisor_name, divisor):
    """Raise `ValueError` for a size that another one doesn't divide; names the nearest that fit."""
    if value % divisor:
        below = value - value % divisor
        near = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise ValueError(f"{name}: {value} should be a multiple of {divisor_name} ({divisor}): for example {near}")
