"""Models of images: a convolutional classifier, and a vision transformer."""

from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Normal, initializer

from mindformers_core.layout import layout
from models.attention import FeedForward
from models.example import Example, columns, floats, ids, rows

__all__ = ["EXAMPLES", "Classifier"]

BATCH = 8


class Classifier(nn.Cell):
    """Two convolutions, a norm, pooling, a linear layer.

    Args:
        norm: makes the norm of a number of channels.
    """

    def __init__(self, norm=lambda channels: nn.GroupNorm(4, channels)):
        super().__init__()
        self.features = nn.SequentialCell(
            nn.Conv2d(3, 8, 3, has_bias=True),
            norm(8),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(8, 8, 3),
            nn.AvgPool2d(2, 2),
        )
        self.flatten = nn.Flatten()
        self.head = nn.Dense(32, 4)

    def construct(self, image, label=None):
        logits = self.head(self.flatten(self.features(image)))
        return logits if label is None else ops.cross_entropy(logits, label)


def classifier_plan(axes):
    inputs = {"image": layout(axes.batch), "label": layout(axes.batch)}
    norm = {"weight": {"gamma": layout(axes.tensor), "beta": layout(axes.tensor)}}
    return {
        "": {"input": inputs, "output": layout()},
        "features.0": {"weight": {"weight": layout(axes.tensor), "bias": layout(axes.tensor)}},
        "features.1": norm,
        "features.4": rows(axes),
        "head": columns(axes),
    }


class VisionLayer(nn.Cell):
    """MindSpore's own attention, and a feed-forward block, each after a norm."""

    def __init__(self, size, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm((size,)), nn.LayerNorm((size,))
        self.mlp = FeedForward(size, 2 * size)
        self.dropout = nn.Dropout(p=0.0)

    def construct(self, x):
        normed = self.norm1(x)
        x = x + self.dropout(self.attention(normed, normed, normed, need_weights=False)[0])
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Cell):
    """Patches embedded by a convolution, a class token in front, positions that are learned."""

    def __init__(self, size=8, layers=1):
        super().__init__()
        self.patches = nn.Conv2d(3, size, 4, 4, pad_mode="valid", has_bias=True)
        self.token = Parameter(initializer(Normal(0.5), (1, 1, size)), name="token")
        self.positions = Parameter(initializer(Normal(0.5), (1, 5, size)), name="positions")
        self.layers = nn.SequentialCell([VisionLayer(size, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm((size,)), nn.Dense(size, 4)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def construct(self, image, label):
        x = self.patches(image)
        batch, size = x.shape[:2]
        x = x.reshape(batch, size, -1).swapaxes(1, 2)
        x = ops.cat((self.token.broadcast_to((batch, 1, size)), x), 1) + self.positions
        return self.loss(self.head(self.norm(self.layers(x))[:, 0]), label)


def vision_plan(axes):
    inputs = {"image": layout(axes.batch), "label": layout(axes.batch)}
    return {
        "": {"input": inputs, "output": layout()},
        "patches": {"weight": {"weight": layout(axes.tensor), "bias": layout(axes.tensor)}},
        "layers.*.attention.out_proj": rows(axes),
        "layers.*.mlp.up": columns(axes),
        "layers.*.mlp.down": rows(axes),
    }


def images(seed):
    return (floats(seed, BATCH, 3, 8, 8), ids(seed + 1, 4, BATCH)), {}


EXAMPLES = {
    "classifier": Example(Classifier, images, classifier_plan),
    "vision transformer": Example(VisionTransformer, images, vision_plan),
}
