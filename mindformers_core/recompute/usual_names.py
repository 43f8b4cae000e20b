"""Names of MindSpore Transformers' Cells, r1.9 and r2.0, and of those that do the same here. For hints. Pure Python."""

__all__ = ["USUAL_NAMES", "WHOLE_NAMES"]

USUAL_NAMES = {
    **dict.fromkeys(("attention", "self_attention"), "self_attn"),
    "flash_attention": "core_attention",
    "attention_norm": "input_layernorm",
    **dict.fromkeys(("ffn_norm", "pre_mlp_layernorm"), "post_attention_layernorm"),
    "norm_out": "norm",
    "feed_forward": "mlp",
    "tok_embeddings": "embed_tokens",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    **dict.fromkeys(("wo", "linear_proj"), "o_proj"),
    "w1": "gate_proj",
    **dict.fromkeys(("w2", "linear_fc2"), "down_proj"),
    "w3": "up_proj",
}
# names of Cells, not ends of several, as `norm` and `proj` are
WHOLE_NAMES = frozenset({*USUAL_NAMES, *USUAL_NAMES.values()} - {"norm"})
