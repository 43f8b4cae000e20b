"""Qwen3 (Yang et al., "Qwen3 technical report", 2025): a Llama whose queries and keys are normed. Pure Python."""

from dataclasses import dataclass, replace

from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.models.families.decoders import decoder_spec
from mindformers_core.models.families.llama import FIXED, KEYS
from mindformers_core.models.spec import HuggingFaceFormat
from mindformers_core.ranges import bounded


@dataclass(frozen=True)
class Qwen3Config(LlamaConfig):
    """Configuration of a Qwen3; defaults as `transformers` has them.

    Attributes:
        head_dim: size of one head. Default: 128.
        attention_bias: whether all four projections of attention have a bias.
        others: as of `LlamaConfig`.
    """

    head_dim: int | None = bounded(128, 1, 2**14)
    attention_bias: bool = False

    def layer_spec(self, layer_number):
        """The `LayerSpec` of the decoder layer with this number in the whole model, from 1."""
        biases = {"query_bias": self.attention_bias, "output_bias": self.attention_bias}
        return replace(super().layer_spec(layer_number), head_norms=True, **biases)


FORMAT = HuggingFaceFormat(
    "qwen3",
    "Qwen3ForCausalLM",
    (*KEYS, "attention_bias"),
    fixed=FIXED | {"use_sliding_window": False},
)
SPEC = decoder_spec(Qwen3Config, FORMAT)
