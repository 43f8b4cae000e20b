"""Mixtral (Jiang et al., "Mixtral of experts", 2024): a Llama whose feed-forward blocks are experts. Pure Python."""

from dataclasses import dataclass, replace

from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.models.families.decoders import decoder_spec, expert_tensors, router_losses
from mindformers_core.models.families.llama import FIXED, KEYS
from mindformers_core.models.spec import FileTensor, HuggingFaceFormat
from mindformers_core.ranges import bounded


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """Configuration of a Mixtral; defaults as `transformers` has them.

    Attributes:
        num_local_experts, num_experts_per_tok: number of experts of a layer, and of those that each token goes to.
        intermediate_size: size inside an expert.
        output_router_logits, router_aux_loss_coef, router_z_loss_coef: as of `Qwen3MoeConfig`.
        others: as of `LlamaConfig`.
    """

    intermediate_size: int = bounded(14336, 1, 2**22)
    num_key_value_heads: int | None = bounded(8, 1, 2**14)
    rms_norm_eps: float = bounded(1e-5, above=0, at_most=1)
    rope_theta: float = bounded(1e6, above=0, at_most=1e12)
    num_local_experts: int = bounded(8, 1, 2**16)
    num_experts_per_tok: int = bounded(2, 1, 2**10)
    output_router_logits: bool = False
    router_aux_loss_coef: float = bounded(0.001, 0, 1e4)
    router_z_loss_coef: float = bounded(0.0, 0, 1e4)

    divided_keys = "num_attention_heads", "key_value_size"

    def layer_spec(self, layer_number):
        """The `LayerSpec` of the decoder layer with this number in the whole model, from 1."""
        router = {"num_experts": self.num_local_experts, "num_experts_per_tok": self.num_experts_per_tok}
        router |= router_losses(self, self.num_hidden_layers)
        return replace(
            super().layer_spec(layer_number), mlp="experts", router=router, expert_size=self.intermediate_size
        )


def _tensor_map(config):
    block, router = "block_sparse_moe", "model.layers.*.{}.gate.weight"
    experts = expert_tensors(config, block=block, names=("w1", "w3", "w2"))
    return (router.format("mlp"), (FileTensor(router.format(block)),)), *experts


FORMAT = HuggingFaceFormat(
    "mixtral",
    "MixtralForCausalLM",
    (*KEYS, "num_local_experts", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
    fixed=FIXED | {"sliding_window": None, "router_jitter_noise": 0.0},
    tensor_map=_tensor_map,
)
SPEC = decoder_spec(MixtralConfig, FORMAT)
