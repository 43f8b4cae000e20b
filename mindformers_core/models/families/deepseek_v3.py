"""DeepSeek-V3 (DeepSeek-AI, 2024): attention by latent vectors. Pure Python."""

from dataclasses import dataclass, replace

from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.models.families.decoders import decoder_spec
from mindformers_core.models.families.llama import FIXED, KEYS
from mindformers_core.models.spec import HuggingFaceFormat
from mindformers_core.ranges import bounded


@dataclass(frozen=True)
class DeepseekV3Config(LlamaConfig):
    """Configuration of a DeepSeek-V3; defaults as `transformers` has them.

    Attributes:
        q_lora_rank: size of the latent vector of queries; None: they have none.
        kv_lora_rank: size of the latent vector of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: sizes of the parts of a head's query and key without and with positions.
        v_head_dim: size of a head's value.
        rope_interleave: whether neighbours are turned together, rather than halves.
        attention_bias: whether the projections to latent vectors, and the last one, have a bias.
        first_k_dense_replace: number of first layers without experts; so far all layers.
        others: as of `LlamaConfig`; `head_dim` is `qk_rope_head_dim`, as there.
    """

    q_lora_rank: int | None = bounded(1536, 1, 2**20)
    kv_lora_rank: int = bounded(512, 1, 2**20)
    qk_nope_head_dim: int = bounded(128, 1, 2**14)
    qk_rope_head_dim: int = bounded(64, 1, 2**14)
    v_head_dim: int = bounded(128, 1, 2**14)
    rope_interleave: bool = True
    attention_bias: bool = False
    first_k_dense_replace: int = bounded(3, 0, 10_000)

    divided_keys = "num_attention_heads", "intermediate_size"

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()
        if self.first_k_dense_replace < self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace: {self.first_k_dense_replace} of {self.num_hidden_layers} layers are dense, "
                "but layers with experts aren't here yet: give num_hidden_layers"
            )

    def layer_spec(self, layer_number):
        """The `LayerSpec` of the decoder layer with this number in the whole model, from 1."""
        biases = {"query_bias": self.attention_bias, "output_bias": self.attention_bias}
        return replace(super().layer_spec(layer_number), attention="latent", **biases)


_KEYS = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave",
    "attention_bias", "first_k_dense_replace",
)  # fmt: skip
FORMAT = HuggingFaceFormat(
    "deepseek_v3", "DeepseekV3ForCausalLM", (*KEYS, *_KEYS), fixed=FIXED, tied_copies=("lm_head.weight",)
)
SPEC = decoder_spec(DeepseekV3Config, FORMAT)
