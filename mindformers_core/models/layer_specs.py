"""What a decoder layer is made of, and which layers a part of a model holds. Pure Python."""

from dataclasses import dataclass, field

__all__ = ["LayerRange", "LayerSpec"]


@dataclass(frozen=True)
class LayerSpec:
    """A Cell class and the classes of its parts, so that a layer can be changed from outside.

    Attributes:
        module: the layer's class, made by `module(config, layer_number, **submodules)`.
        submodules: classes by argument name.
    """

    module: type
    submodules: dict = field(default_factory=dict)


@dataclass(frozen=True)
class LayerRange:
    """Consecutive decoder layers of a model: all of them, or those of a pipeline stage.

    Attributes:
        offset: number of decoder layers of the whole model before these.
        count: number of these; the first and the last part of a model may have none.
        is_first, is_last: whether this is the part with the embedding, and the part with the output layer.
    """

    offset: int
    count: int
    is_first: bool = True
    is_last: bool = True
