"""Stages of a pipeline by hand: build the whole model, and take away what other stages hold (RFC ICY7S6)."""

__all__ = ["model_split_manual"]


def model_split_manual(model, stage_index, layers_per_stage):
    """Makes a stage of a whole `LlamaForCausalLM`, in place.

    Build the model under `ms.DeviceCtx("meta")`: then nothing is ever allocated for other stages.

    Args:
        model: the whole model, before `shard()`.
        stage_index: which stage to keep, from 0.
        layers_per_stage: number of decoder layers of every stage.

    Returns:
        `model` itself: paths, and so initial values, are those of the whole model.

    Raises:
        ValueError: no such stage, layers that don't make the model's, or a model that is a stage already.
    """
    decoder, last = model.model, len(layers_per_stage) - 1
    if not 0 <= stage_index <= last:
        raise ValueError(f"stage_index: {stage_index} should be from 0 to {last}")
    whole = decoder.config.num_hidden_layers
    if len(decoder.layers) != whole:
        raise ValueError(f"the model is a stage already: it has {len(decoder.layers)} of {whole} layers: build all")
    if sum(layers_per_stage) != whole:
        raise ValueError(
            f"layers_per_stage: {list(layers_per_stage)} makes {sum(layers_per_stage)} layers, but num_hidden_layers "
            f"is {whole}"
        )
    names = list(decoder.layers.keys())
    offset = sum(layers_per_stage[:stage_index])
    for name in (*names[:offset], *names[offset + layers_per_stage[stage_index] :]):
        del decoder.layers[name]
    if stage_index > 0:
        decoder.is_first = False
        if stage_index < last or not model.is_tied:
            decoder.embed_tokens = None
    if stage_index < last:
        decoder.norm = None
        model.lm_head = None
    return model
