"""Llama by its name in Hugging Face's `transformers`: the decoder of a `LlamaConfig`."""

from mindformers_core.models.decoder import CausalDecoder


class LlamaForCausalLM(CausalDecoder):
    """A `CausalDecoder`: ids (batch, length) → logits (batch, length, vocab_size), or the loss; arguments as there."""


def llama_for_training(config, layers=None):
    """A `LlamaForCausalLM` that returns the sum of the losses, and the number of labels."""
    return LlamaForCausalLM(config, layers=layers, loss="sum")
