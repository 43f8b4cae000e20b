"""What a decoder layer is made of, and which layers a pipeline stage holds. Pure Python.

The numbering is Megatron-LM's, which the RFC (ICY7S6, `build_layer`) follows: layer numbers count from 1, locally in a
chunk of the model; adding the chunk's offset gives the number in the whole model.
"""

from dataclasses import dataclass, field

__all__ = ["LayerSpec", "get_transformer_layer_offset", "get_num_layers_to_build"]


@dataclass(frozen=True)
class LayerSpec:
    """A Cell class and the classes of its parts, so that a layer can be changed from outside.

    Attributes:
        module: the layer's class, made by `module(config, layer_number, **submodules)`.
        submodules: classes by argument name.
    """

    module: type
    submodules: dict = field(default_factory=dict)


def get_num_layers_to_build(config, vp_stage=None):
    """Number of layers in this process's chunk `vp_stage` of the model; without one, in its only chunk.

    Raises:
        ValueError: `vp_stage` out of range, or None where there are several chunks.
    """
    _check_stage(config, vp_stage)
    return config.num_hidden_layers // (config.pipeline_parallel * config.virtual_pipeline)


def get_transformer_layer_offset(config, vp_stage=None):
    """Number of layers of the whole model before this process's chunk `vp_stage`.

    Chunks go round the ranks (Narayanan et al., 2021): rank r holds the chunks r, r + p, r + 2p, … of p ranks.

    Raises:
        ValueError: as `get_num_layers_to_build`.
    """
    layers = get_num_layers_to_build(config, vp_stage)
    return ((vp_stage or 0) * config.pipeline_parallel + config.pipeline_rank) * layers


def _check_stage(config, vp_stage):
    chunks = config.virtual_pipeline
    if vp_stage is None and chunks > 1:
        raise ValueError(f"vp_stage: with virtual_pipeline={chunks} say which chunk to build, 0 to {chunks - 1}")
    if vp_stage is not None and not 0 <= vp_stage < chunks:
        raise ValueError(f"vp_stage: {vp_stage} should be from 0 to {chunks - 1} with virtual_pipeline={chunks}")
