"""A Llama as Hugging Face's `transformers` has it: folders with its files."""

import json

import numpy as np
from safetensors.numpy import save_file

CONFIG = {  # as LlamaConfig.save_pretrained of transformers 4.51 writes it
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 4, "hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.02,
    "intermediate_size": 24, "max_position_embeddings": 64, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "float32", "transformers_version": "4.51.0", "use_cache": True, "vocab_size": 256,
}  # fmt: skip
NEWER = {"dtype": "float32", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}  # of transformers 5


def weights(config, seed=0):
    """Random weights by Hugging Face's names, float32."""
    rng, head = np.random.default_rng(seed), config["head_dim"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = config["vocab_size"], hidden
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return {name: (rng.standard_normal(shape) * 0.3 + (len(shape) == 1)).astype(np.float32) for name, shape in
            shapes.items()}  # fmt: skip


def write_folder(folder, config, tensors, files=1):
    """A folder as `save_pretrained` leaves it; with several files, the index as well."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    places = {name: f"model-{1 + k % files:05d}-of-{files:05d}.safetensors" for k, name in enumerate(tensors)}
    for place in set(places.values()):
        held = {name: array for name, array in tensors.items() if places[name] == place}
        save_file(held, folder / place, {"format": "pt"})
    index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
