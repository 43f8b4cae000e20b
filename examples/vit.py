"""A vision transformer as one writes it for one card, its batches, and its training there: `python examples/vit.py`."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

SIZE, HEADS, LAYERS, CLASSES, ROWS, STEPS = 32, 4, 2, 4, 16, 3


class Attention(nn.Cell):
    """Every patch looks at all patches."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Dense(SIZE, SIZE) for _ in range(4))

    def construct(self, x):
        rows, patches, _ = x.shape
        q, k, v = (linear(x).reshape(rows, patches, HEADS, -1).swapaxes(1, 2) for linear in (self.q, self.k, self.v))
        weights = ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) * (SIZE // HEADS) ** -0.5, -1)
        return self.o(ops.matmul(weights, v).swapaxes(1, 2).reshape(rows, patches, SIZE))


class Layer(nn.Cell):
    """Attention and two linear layers, each after a norm, around which the input goes."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm((SIZE,)), Attention(), nn.LayerNorm((SIZE,))
        self.up, self.down = nn.Dense(SIZE, 4 * SIZE), nn.Dense(4 * SIZE, SIZE)

    def construct(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(ops.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Cell):
    """Images (rows, 3, 16, 16) and labels (rows,) → the mean loss."""

    layer = Layer

    def __init__(self):
        super().__init__()
        self.patches = nn.Dense(3 * 4 * 4, SIZE)
        self.positions = Parameter(Tensor(np.zeros((16, SIZE), np.float32)))
        self.layers = nn.CellList([self.layer() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm((SIZE,)), nn.Dense(SIZE, CLASSES)

    def construct(self, image, label):
        cut = image.reshape(-1, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 16, 48)
        x = self.patches(cut) + self.positions
        for layer in self.layers:
            x = layer(x)
        return ops.cross_entropy(self.head(self.norm(x).mean(1)), label)


def batch_of(step, part=0, parts=1):
    """One of several equal parts of a step's images and labels: arrays."""
    random, own = np.random.default_rng(step), slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    image = random.standard_normal((ROWS, 3, 16, 16)).astype(np.float32)
    label = (image[:, 0, :8].mean((1, 2)) > 0) + 2 * (image[:, 1, :, :8].mean((1, 2)) > 0)
    return image[own], label.astype(np.int32)[own]


def train():
    """The losses on one card."""
    ms.set_seed(0)
    net, losses = VisionTransformer(), []
    optimizer, step = nn.Adam(net.trainable_params()), ms.value_and_grad(net, None, net.trainable_params())
    for number in range(STEPS):
        loss, gradients = step(*map(Tensor, batch_of(number)))
        optimizer(gradients)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    print("losses", [round(loss, 4) for loss in train()])
