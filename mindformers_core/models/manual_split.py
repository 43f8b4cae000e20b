"""A pipeline stage made of a whole model by removing the modules of other stages (RFC ICY7S6)."""


def model_split_manual(model, stage_index, layers_per_stage):
    """Make a stage of a whole `CausalDecoder`, in place.

    A model built under `ms.DeviceCtx("meta")` allocates no memory for other stages.

    Args:
        model: the whole model, before `shard()`.
        stage_index: number of the stage, from 0.
        layers_per_stage: number of decoder layers of every stage.

    Returns:
        `model` itself: paths, and therefore initial values, are those of the whole model.

    Raises:
        ValueError: no such stage, a sum of layers other than the model's, or a model that is a stage already, or that
            has experts.
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
    if model.routers:
        raise ValueError(
            "stages of a model with experts pass on what routers say: build each with layers=LayerRange(…)"
        )
    names = list(decoder.layers.keys())
    offset = sum(layers_per_stage[:stage_index])
    for name in (*names[:offset], *names[offset + layers_per_stage[stage_index] :]):
        del decoder.layers[name]
    if stage_index > 0:
        decoder.is_first, decoder.embed_positions = False, None
        if stage_index < last or not model.is_tied:
            decoder.embed_tokens = None
    if stage_index < last:
        decoder.norm = None
        model.lm_head = None
    return model
