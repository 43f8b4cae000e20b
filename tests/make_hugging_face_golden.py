"""Writes what `transformers` does with small models into tests/golden; needs the packages torch and transformers.

With names of folders as arguments only these; with `rope` the file of scaled rotary frequencies.

python tests/make_hugging_face_golden.py
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GOLDEN = Path(__file__).resolve().parent / "golden"
COMMON = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}  # fmt: skip
LLAMA = COMMON | {"model_type": "llama"}
MODELS = {
    "llama_tied": LLAMA | {"tie_word_embeddings": True, "rope_theta": 10000.0},
    "llama_untied": LLAMA | {"tie_word_embeddings": False, "rope_theta": 500000.0, "head_dim": 8},
    "qwen3": COMMON | {"model_type": "qwen3", "head_dim": 8, "attention_bias": True, "rope_theta": 1e6},
    "qwen3_moe": COMMON | {
        "model_type": "qwen3_moe", "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "norm_topk_prob": True, "decoder_sparse_step": 2,
    },
    "mixtral": COMMON | {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "initializer_range": 0.5, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
    "deepseek_v3": COMMON | {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "first_k_dense_replace": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8,
        "num_nextn_predict_layers": 0,  # `transformers` writes 1, and no head
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 16,
        },
    },
}  # fmt: skip
LONG = 96  # positions, more than 64
SCALED = {  # changes of llama_untied
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "max_position_embeddings": 256,
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, all of its keys": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
            "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False,
        },
        "max_position_embeddings": 128,
    },
    "yarn, attention_factor": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
}  # fmt: skip
LLAMA_3_1 = {  # sizes of Llama 3.1 8B
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


def write_golden(folder, seed=0, **settings):
    """A folder as `save_pretrained` leaves it, with `expected.safetensors` beside: ids (4, 17), the logits of every
    second position of a row, the loss of predicting the next ids, its gradients, and the 24 likeliest tokens after it.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or "ln_" in name or name.endswith(".bias") and weight.is_floating_point():
                weight.add_(0.3 * torch.randn_like(weight))
            if name.endswith("correction_bias"):  # not negative: `transformers` takes experts of no group before those
                weight.add_(0.3 * torch.rand_like(weight))
    model.save_pretrained(folder)
    ids = torch.randint(0, config.vocab_size, (4, 17))
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    gradients = {  # None: of an idle expert
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    with TemporaryDirectory() as beside:  # in files experts have a tensor each
        model.save_pretrained(beside, state_dict=gradients)
        arrays = {f"gradients.{name}": each for name, each in load_file(f"{beside}/model.safetensors").items()}
    arrays |= {"ids": ids.int(), "logits": found.logits[:1, 1:-1:2].detach(), "loss": found.loss.detach()}
    model.generation_config.eos_token_id = None
    arrays["tokens"] = model.generate(ids[:1], max_new_tokens=24, do_sample=False)[:, 17:].int()
    save_file({name: np.ascontiguousarray(array.numpy()) for name, array in arrays.items()}, expected_file(folder))


def write_scaled():
    """Of each scaling the logits of the last 4 of 96 positions, frequencies, and the factor of cosines and sines.

    The configs, as `transformers` writes them, are the file's metadata. Of Llama 3.1 there are frequencies only.
    """
    ids, arrays = np.random.default_rng(0).integers(0, COMMON["vocab_size"], (1, LONG)), {}
    common = MODELS["llama_untied"] | {"rope_theta": 100.0}
    configs = {name: LlamaConfig(**common | changes) for name, changes in SCALED.items()}
    for name, config in configs.items():
        model = LlamaForCausalLM.from_pretrained(GOLDEN / "llama_untied", config=config).eval()
        with torch.no_grad():
            arrays[f"{name}.logits"] = model(torch.from_numpy(ids)).logits[:, -4:].numpy()
    configs["Llama 3.1 8B"] = LlamaConfig(**LLAMA_3_1)
    for name, config in configs.items():
        found = ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]](config, "cpu", seq_len=LONG)
        arrays |= {f"{name}.frequencies": found[0].numpy(), f"{name}.factor": np.array(found[1])}
    arrays = {name: np.ascontiguousarray(array) for name, array in (arrays | {"ids": ids.astype(np.int32)}).items()}
    texts = {name: config.to_json_string() for name, config in configs.items()}
    save_file(arrays, GOLDEN / "rope_scaling.safetensors", texts)


def expected_file(folder):
    return Path(folder) / "expected.safetensors"


def logits_of(folder, ids):
    """The logits of the model in a folder, an array, for an array of ids."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.numpy()


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["rope", *MODELS]
    if "rope" in chosen:
        write_scaled()
    for name in MODELS.keys() & chosen:
        write_golden(GOLDEN / name, **MODELS[name])
