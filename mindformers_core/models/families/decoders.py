"""What the `ModelSpec`s of all decoders have in common. Pure Python."""

from mindformers_core.models.spec import EACH, FileTensor, ModelSpec, routed_layers
from mindformers_core.operators.signature import tensor_meta


def decoder_spec(config, hugging_face, cell="mindformers_core.models.decoder:decoder_for_training"):
    """The `ModelSpec` of a family, for the class of its config and its `HuggingFaceFormat`."""
    return ModelSpec(
        cell,
        config,
        loss="sum",
        ignored={"labels": -100},
        inputs=("input_ids", "labels", "positions", "places"),
        boundary=_boundary,
        tied=_tied,
        divided=_divided,
        hugging_face=hugging_face,
    )


def _boundary(config, batch, length):
    routers, _, columns = routed_layers(config)
    hidden = tensor_meta((batch, length, config.hidden_size), config.dtype)
    return (hidden, tensor_meta(((1 + len(routers)) * columns,), "float32")) if routers else hidden


def _tied(config):
    is_embedded_again = config.tie_word_embeddings or config.num_nextn_predict_layers
    return ("model.embed_tokens.weight",) if is_embedded_again else ()


def _divided(config):
    layers = [config.get_config_for_layer(number) for number in range(1, config.num_hidden_layers + 1)]
    named = {"key_value_size": "num_key_value_heads x head_dim"}
    pairs = ((named.get(key, key), getattr(layer, key)) for layer in layers for key in config.divided_keys)
    return list(dict.fromkeys(pairs))


def expert_tensors(config, layer="model.layers.*.", block="mlp", names=("gate_proj", "up_proj", "down_proj")):
    """A tensor map of the experts of these layers, of which files have each one's three weights, in this block."""
    gate, up, down = (f"model.layers.*.{block}.experts.#.{name}.weight" for name in names)
    halves = FileTensor(gate, (EACH, 0), 2), FileTensor(up, (EACH, 1), 2)
    ours = f"{layer}mlp.experts."
    return (f"{ours}gate_up_proj", halves), (f"{ours}down_proj", (FileTensor(down, (EACH,), 1),))


def router_losses(config, layers):
    """The factors of the router's losses in each of so many layers with experts, a dict: see `Qwen3MoeConfig`."""
    if not config.output_router_logits:
        return {}
    aux = config.router_aux_loss_coef * config.num_experts_per_tok
    return {"aux_loss_coef": aux / layers, "z_loss_coef": config.router_z_loss_coef / layers}
