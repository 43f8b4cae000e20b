"""GPT-2 (Radford et al., 2019): learned positions, tied embeddings, layer norms, biases everywhere. Pure Python.

Its files have one tensor for queries, keys and values, and transposed weights of linear layers.
"""

from dataclasses import dataclass

from mindformers_core.models.configuration import MOST_LAYERS, check_divides, check_dtype, check_layer_number
from mindformers_core.models.families.decoders import decoder_spec
from mindformers_core.models.spec import FileTensor, HuggingFaceFormat, LayerSpec
from mindformers_core.ranges import bounded, check_fields


@dataclass(frozen=True)
class GPT2Config:
    """Configuration of a GPT-2.

    Attributes:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: as of `LlamaConfig`.
        intermediate_size: size inside the feed-forward block. Default: 4 times `hidden_size`.
        max_position_embeddings: longest sequence, each of whose positions has a row of a table.
        layer_norm_eps: added to the variance in the norms.
        tie_word_embeddings, attention_dropout, initializer_range, dtype: as of `LlamaConfig`, and so what counts in a
            pipeline's split.

    Raises:
        TypeError, ValueError: a value of the wrong type, out of range, or in contradiction to another one.
    """

    vocab_size: int = bounded(50257, 1, 2**24)
    hidden_size: int = bounded(768, 1, 2**20)
    intermediate_size: int | None = bounded(None, 1, 2**22)
    num_hidden_layers: int = bounded(12, 1, MOST_LAYERS)
    num_attention_heads: int = bounded(12, 1, 2**14)
    max_position_embeddings: int = bounded(1024, 1, 2**24)
    layer_norm_eps: float = bounded(1e-5, above=0, at_most=1)
    tie_word_embeddings: bool = True
    attention_dropout: float = bounded(0.0, 0, below=1)
    initializer_range: float = bounded(0.02, above=0, at_most=100)
    dtype: str = "float32"
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    divided_keys = "num_attention_heads", "intermediate_size"
    rotary_size, learns_positions, num_nextn_predict_layers = 0, True, 0

    def __post_init__(self):
        if self.intermediate_size is None and type(self.hidden_size) is int:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        check_fields(self)
        check_dtype(self.dtype)
        check_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)

    @property
    def num_key_value_heads(self):
        """As many as query heads."""
        return self.num_attention_heads

    @property
    def head_dim(self):
        """Size of one head."""
        return self.hidden_size // self.num_attention_heads

    def get_config_for_layer(self, global_layer_number):
        """The config itself: all layers are equal. ValueError: no such layer."""
        check_layer_number(self, global_layer_number)
        return self

    def layer_spec(self, layer_number):
        """The `LayerSpec` of all layers."""
        biases = {"query_bias": True, "output_bias": True, "mlp_bias": True}
        return LayerSpec(mlp="plain", norm="layer", norm_eps=self.layer_norm_eps, **biases)


def _tensor_map(config):
    layer, theirs, hidden = "model.layers.*.", "transformer.h.*.", config.hidden_size
    renamed = {
        "model.embed_tokens.": "transformer.wte.", "model.embed_positions.": "transformer.wpe.",
        "model.norm.": "transformer.ln_f.", f"{layer}input_layernorm.": f"{theirs}ln_1.",
        f"{layer}post_attention_layernorm.": f"{theirs}ln_2.",
    }  # fmt: skip
    linear = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    places = {
        f"self_attn.{name}_proj": ("attn.c_attn", (place * hidden, 3 * hidden)) for place, name in enumerate("qkv")
    }
    found = [(f"{ours}*", FileTensor(f"{name}*")) for ours, name in renamed.items()]
    for ours, (name, at) in ({key: (name, None) for key, name in linear.items()} | places).items():
        found.append((f"{layer}{ours}.weight", FileTensor(f"{theirs}{name}.weight", at=at, transposed=True)))
        found.append((f"{layer}{ours}.bias", FileTensor(f"{theirs}{name}.bias", at=at)))
    return [(pattern, (tensor,)) for pattern, tensor in found]


_ALIASES = {
    "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    "attention_dropout": "attn_pdrop",
}  # fmt: skip
FORMAT = HuggingFaceFormat(
    "gpt2",
    "GPT2LMHeadModel",
    ("vocab_size", *_ALIASES, "tie_word_embeddings", "initializer_range"),
    aliases=_ALIASES,
    fixed={
        "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False, "quantization_config": None,
    },
    written={"embd_pdrop": 0.0, "resid_pdrop": 0.0},
    tensor_map=_tensor_map,
    ignored=("*.attn.bias", "*.attn.masked_bias"),
)  # fmt: skip
SPEC = decoder_spec(GPT2Config, FORMAT)
