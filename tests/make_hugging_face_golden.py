"""Writes what `transformers` does with small Llamas into tests/golden; needs the packages torch and transformers.

python tests/make_hugging_face_golden.py
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

GOLDEN = Path(__file__).resolve().parent / "golden"
COMMON = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}  # fmt: skip
MODELS = {
    "llama_tied": {"tie_word_embeddings": True, "rope_theta": 10000.0},
    "llama_untied": {"tie_word_embeddings": False, "rope_theta": 500000.0, "head_dim": 8},
}


def write_golden(folder, seed=0, **settings):
    """A folder as `save_pretrained` leaves it, with `expected.safetensors` beside: ids (4, 17), and of these the logits
    of the first 16 positions, the loss of predicting the next, its gradients, and the 24 likeliest tokens after a row.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**COMMON, **settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    ids = torch.randint(0, COMMON["vocab_size"], (4, 17))
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    arrays = {f"gradients.{name}": weight.grad for name, weight in model.named_parameters()}
    arrays |= {"ids": ids.int(), "logits": found.logits[:, :-1].detach(), "loss": found.loss.detach()}
    model.generation_config.eos_token_id = None
    arrays["tokens"] = model.generate(ids[:1], max_new_tokens=24, do_sample=False)[:, 17:].int()
    save_file({name: np.ascontiguousarray(array.numpy()) for name, array in arrays.items()}, expected_file(folder))


def expected_file(folder):
    return Path(folder) / "expected.safetensors"


def logits_of(folder, ids):
    """The logits of the model in a folder, an array, for an array of ids."""
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.numpy()


if __name__ == "__main__":
    for name, settings in MODELS.items():
        write_golden(GOLDEN / name, **settings)
