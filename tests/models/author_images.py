"""Models of images as their authors write them on one card; each returns its loss."""

from mindspore import nn, ops

__all__ = ["Diffusion", "ResNet", "UNet"]


class ResidualBlock(nn.Cell):
    """Two convolutions of `nn` with group norms, and a shortcut."""

    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride), nn.GroupNorm(2, out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3), nn.GroupNorm(2, out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride)

    def construct(self, x):
        y = ops.relu(self.norm1(self.conv1(x)))
        return ops.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Cell):
    """Residual blocks, one with a stride, and a mean over the image."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.SequentialCell(ResidualBlock(3, 4), ResidualBlock(4, 8, 2))
        self.head = nn.Dense(8, 4)

    def construct(self, image, label):
        return ops.cross_entropy(self.head(self.blocks(image).mean((2, 3))), label)


class UNet(nn.Cell):
    """One level down and up again by a transposed convolution, joined with the level's own features."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, has_bias=True)
        self.down = nn.Conv2d(4, 8, 3, 2)
        self.up = nn.Conv2dTranspose(8, 4, 2, 2, pad_mode="valid")
        self.leave = nn.Conv2d(8, 3, 3, has_bias=True)

    def construct(self, image, target):
        x = ops.silu(self.enter(image))
        y = self.up(ops.silu(self.down(x)))
        return ops.mse_loss(self.leave(ops.cat((x, y), 1)), target)


class Diffusion(nn.Cell):
    """A DiT block: patches, timesteps in sines, adaptive norms that start small, attention, and the noise's loss."""

    def __init__(self, size=8, heads=2):
        super().__init__()
        self.size, self.heads = size, heads
        self.patch = nn.Conv2d(3, size, 2, 2, pad_mode="valid", has_bias=True)
        self.modulation = nn.Dense(size, 6 * size)
        self.qkv, self.project = nn.Dense(size, 3 * size), nn.Dense(size, size)
        self.up, self.down, self.leave = nn.Dense(size, 4 * size), nn.Dense(4 * size, size), nn.Dense(size, 12)
        self.norm = nn.LayerNorm((size,))

    def construct(self, image, time, noise):
        batch, size = image.shape[0], self.size
        frequencies = ops.exp(ops.arange(size // 2).astype(image.dtype) * -0.5)
        angles = time.expand_dims(1) * frequencies.expand_dims(0)
        condition = self.modulation(ops.silu(ops.cat((ops.cos(angles), ops.sin(angles)), 1)))
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunk(condition.expand_dims(1), 6, 2)
        x = self.patch(image + noise).reshape(batch, size, -1).swapaxes(1, 2)
        qkv = self.qkv(self.norm(x) * (1 + scale1) + shift1)
        q, k, v = [part.reshape(batch, -1, self.heads, size // self.heads).swapaxes(1, 2) for part in qkv.chunk(3, 2)]
        scores = ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) * (size // self.heads) ** -0.5, -1)
        x = x + gate1 * self.project(ops.matmul(scores, v).swapaxes(1, 2).reshape(batch, -1, size))
        x = x + gate2 * self.down(ops.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))
        predicted = self.leave(x).reshape(batch, 2, 2, 3, 2, 2).transpose(0, 3, 1, 4, 2, 5).reshape(batch, 3, 4, 4)
        return ops.mse_loss(predicted, noise)
