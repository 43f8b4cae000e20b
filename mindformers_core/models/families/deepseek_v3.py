"""DeepSeek-V3 (DeepSeek-AI, 2024): attention by latent vectors, routed and shared experts. Pure Python."""

from dataclasses import dataclass, replace

from mindformers_core.models.configuration import LlamaConfig
from mindformers_core.models.families.decoders import decoder_spec, expert_tensors
from mindformers_core.models.families.llama import FIXED, KEYS
from mindformers_core.models.spec import FileTensor, HuggingFaceFormat
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
        first_k_dense_replace: number of first layers without experts.
        n_routed_experts, num_experts_per_tok: number of experts of a layer, and of those that each token goes to.
        n_shared_experts: as many experts' sizes has the block that all tokens go through; 0: there is none.
        moe_intermediate_size: size inside an expert.
        n_group, topk_group, norm_topk_prob, routed_scaling_factor: as of `RouterConfig`.
        aux_loss_alpha: factor of the loss of each sequence's loads, the sum over layers, see `RouterConfig`.
        bias_update_rate: what each step adds to, or takes from, the bias of an expert, see `balanced`.
        num_nextn_predict_layers: number of heads that predict tokens behind the next one; Hugging Face's files of the
            model have one, which `transformers` leaves out. Default: none.
        mtp_loss_factor: of their mean loss.
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
    n_routed_experts: int = bounded(256, 1, 2**16)
    n_shared_experts: int = bounded(1, 0, 2**10)
    num_experts_per_tok: int = bounded(8, 1, 2**10)
    moe_intermediate_size: int = bounded(2048, 1, 2**22)
    n_group: int = bounded(8, 1, 2**10)
    topk_group: int = bounded(4, 1, 2**10)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = bounded(2.5, above=0, at_most=1e4)
    aux_loss_alpha: float = bounded(0.0, 0, 1e4)
    bias_update_rate: float = bounded(0.001, 0, 1)
    num_nextn_predict_layers: int = bounded(0, 0, 64)
    mtp_loss_factor: float = bounded(0.3, 0, 1e4)

    divided_keys = "num_attention_heads", "intermediate_size"

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()

    def layer_spec(self, layer_number):
        """The `LayerSpec` of the decoder layer with this number in the whole model, from 1."""
        biases = {"query_bias": self.attention_bias, "output_bias": self.attention_bias}
        spec = replace(super().layer_spec(layer_number), attention="latent", **biases)
        if layer_number <= self.first_k_dense_replace:
            return spec
        router = {key: getattr(self, key) for key in _ROUTER}
        router |= {"num_experts": self.n_routed_experts, "scores": "sigmoid", "has_bias": True}
        router |= {"seq_aux_loss_coef": self.aux_loss_alpha, "bias_update_rate": self.bias_update_rate}
        size = self.moe_intermediate_size
        return replace(spec, mlp="experts", router=router, expert_size=size, shared_size=size * self.n_shared_experts)


def _tensor_map(config):
    """Heads are layers behind the last one in files, which repeat the embedding and the output layer."""
    head, theirs = "heads.*.", "model.layers.*."
    own = [(f"{head}{name}.weight", f"{theirs}{name}.weight") for name in ("enorm", "hnorm", "eh_proj")]
    own += [(f"{head}norm.weight", f"{theirs}shared_head.norm.weight"), (f"{head}layer.*", f"{theirs}*")]
    experts = *expert_tensors(config), *expert_tensors(config, f"{head}layer.")
    return *experts, *((name, (FileTensor(tensor),)) for name, tensor in own)


_ROUTER = "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"
_KEYS = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave",
    "attention_bias", "first_k_dense_replace", "n_routed_experts", "n_shared_experts", "moe_intermediate_size",
    "num_nextn_predict_layers", *_ROUTER,
)  # fmt: skip
FORMAT = HuggingFaceFormat(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (*KEYS, *_KEYS),
    fixed=FIXED,
    tensor_map=_tensor_map,
    ignored=("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"),
    kept=("*.e_score_correction_bias",),
)
SPEC = decoder_spec(DeepseekV3Config, FORMAT)
