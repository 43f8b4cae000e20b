"""Qwen3 with experts (Yang et al., "Qwen3 technical report", 2025). Pure Python."""

from dataclasses import dataclass, replace

from mindformers_core.models.families.decoders import decoder_spec, expert_tensors, router_losses
from mindformers_core.models.families.qwen3 import FORMAT as DENSE, Qwen3Config
from mindformers_core.ranges import bounded


@dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """Configuration of a Qwen3 with experts; defaults as `transformers` has them.

    Attributes:
        num_experts, num_experts_per_tok: number of experts of a layer, and of those that each token goes to.
        moe_intermediate_size: size inside an expert.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        decoder_sparse_step: every so many layers one has experts, the last of them.
        mlp_only_layers: numbers of layers without experts, from 0.
        output_router_logits: whether the loss has the router's.
        router_aux_loss_coef: factor of the router's loss, the mean over layers of E · Σ_i (count_i / T) · mean_i, see
            `RouterConfig`. Of one layer with experts it is that of `transformers`, which mixes the counts of several.
        router_z_loss_coef: of the mean over layers of ST-MoE's loss, which `transformers` doesn't have. Default: 0.
        expert_capacity: (most, size): of each `size` consecutive tokens an expert takes `most` choices, and others are
            dropped, which `transformers` doesn't do. Default: all are taken.
        others: as of `Qwen3Config`.
    """

    num_experts: int = bounded(128, 1, 2**16)
    num_experts_per_tok: int = bounded(8, 1, 2**10)
    moe_intermediate_size: int = bounded(768, 1, 2**22)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = bounded(1, 1, 10_000)
    mlp_only_layers: tuple[int, ...] = ()
    output_router_logits: bool = False
    router_aux_loss_coef: float = bounded(0.001, 0, 1e4)
    router_z_loss_coef: float = bounded(0.0, 0, 1e4)
    expert_capacity: tuple[int, int] | None = bounded(None, 1, 2**20)

    def layer_spec(self, layer_number):
        """The `LayerSpec` of the decoder layer with this number in the whole model, from 1."""
        spec = super().layer_spec(layer_number)
        if not self._has_experts(layer_number):
            return spec
        router = {key: getattr(self, key) for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob")}
        router |= router_losses(self, sum(map(self._has_experts, range(1, self.num_hidden_layers + 1))))
        sizes = {"expert_size": self.moe_intermediate_size, "capacity": self.expert_capacity}
        return replace(spec, mlp="experts", router=router, **sizes)

    def _has_experts(self, layer_number):
        return layer_number - 1 not in self.mlp_only_layers and layer_number % self.decoder_sparse_step == 0


_KEYS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers", "output_router_logits", "router_aux_loss_coef",
)  # fmt: skip
FORMAT = replace(
    DENSE,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(*DENSE.keys, *_KEYS),
    tensor_map=expert_tensors,
)
SPEC = decoder_spec(Qwen3MoeConfig, FORMAT)
