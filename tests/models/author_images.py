"""Models of images as their authors write them on one card; each returns its loss."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

__all__ = ["Autoencoder", "Diffusion", "ResNet", "Transformer", "UNet", "Views"]


class ResidualBlock(nn.Cell):
    """Two convolutions of `nn` with batch norms, and a shortcut."""

    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3), nn.BatchNorm2d(out)
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
    """A level down and up again by a transposed convolution, group norms, joined with the level's own features."""

    def __init__(self, colours=3, channels=4):
        super().__init__()
        self.enter = nn.Conv2d(colours, channels, 3, has_bias=True)
        self.down = nn.Conv2d(channels, 2 * channels, 3, 2)
        self.up = nn.Conv2dTranspose(2 * channels, channels, 2, 2, pad_mode="valid")
        self.norm1, self.norm2 = nn.GroupNorm(channels // 2, channels), nn.GroupNorm(2, 2 * channels)
        self.leave = nn.Conv2d(2 * channels, colours, 3, has_bias=True)

    def construct(self, image, target):
        x = ops.silu(self.norm1(self.enter(image)))
        y = self.up(ops.silu(self.norm2(self.down(x))))
        return ops.mse_loss(self.leave(ops.cat((x, y), 1)), target)


class Diffusion(nn.Cell):
    """A DiT block: noise and timesteps of its own, patches, sines, adaptive norms, attention, and the noise's loss."""

    def __init__(self, size=8, heads=2, steps=100):
        super().__init__()
        self.size, self.heads, self.steps = size, heads, steps
        self.patch = nn.Conv2d(3, size, 2, 2, pad_mode="valid", has_bias=True)
        self.modulation = nn.Dense(size, 6 * size)
        self.qkv, self.project = nn.Dense(size, 3 * size), nn.Dense(size, size)
        self.up, self.down, self.leave = nn.Dense(size, 4 * size), nn.Dense(4 * size, size), nn.Dense(size, 12)
        self.norm = nn.LayerNorm((size,))
        self.kept = Tensor(np.cumprod(1 - np.linspace(1e-4, 0.05, steps)).astype(np.float32))

    def construct(self, image):
        batch, size = image.shape[0], self.size
        noise, time = ops.randn_like(image), ops.randint(0, self.steps, (batch,))
        kept = ops.gather(self.kept, time, 0).reshape(-1, 1, 1, 1)
        frequencies = ops.exp(ops.arange(size // 2).astype(image.dtype) * -0.5)
        angles = time.astype(image.dtype).expand_dims(1) * frequencies.expand_dims(0)
        condition = self.modulation(ops.silu(ops.cat((ops.cos(angles), ops.sin(angles)), 1)))
        shift1, scale1, gate1, shift2, scale2, gate2 = ops.chunk(condition.expand_dims(1), 6, 2)
        x = self.patch(ops.sqrt(kept) * image + ops.sqrt(1 - kept) * noise).reshape(batch, size, -1).swapaxes(1, 2)
        qkv = self.qkv(self.norm(x) * (1 + scale1) + shift1)
        q, k, v = [part.reshape(batch, -1, self.heads, size // self.heads).swapaxes(1, 2) for part in qkv.chunk(3, 2)]
        scores = ops.softmax(ops.matmul(q, k.swapaxes(2, 3)) * (size // self.heads) ** -0.5, -1)
        x = x + gate1 * self.project(ops.matmul(scores, v).swapaxes(1, 2).reshape(batch, -1, size))
        x = x + gate2 * self.down(ops.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))
        predicted = self.leave(x).reshape(batch, 2, 2, 3, 2, 2).transpose(0, 3, 1, 4, 2, 5).reshape(batch, 3, 4, 4)
        return ops.mse_loss(predicted, noise)


class Autoencoder(nn.Cell):
    """A VAE: means and deviations from convolutions, one sample of each, an image by transposed convolutions."""

    def __init__(self, latent=4):
        super().__init__()
        first, second = nn.Conv2d(3, 4, 3, 2, has_bias=True), nn.Conv2d(4, 8, 3, 2, has_bias=True)
        self.encoder = nn.SequentialCell(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten())
        self.mean, self.log_variance, self.grow = nn.Dense(32, latent), nn.Dense(32, latent), nn.Dense(latent, 32)
        first, second = (nn.Conv2dTranspose(*ends, 2, 2, pad_mode="valid", has_bias=True) for ends in ((8, 4), (4, 3)))
        self.decoder = nn.SequentialCell(first, nn.ReLU(), second, nn.Sigmoid())

    def construct(self, image):
        hidden = self.encoder(image)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        latent = mean + ops.exp(0.5 * log_variance) * ops.randn_like(mean)
        drawn = self.decoder(ops.relu(self.grow(latent)).reshape(-1, 8, 2, 2))
        divergence = -0.5 * (1 + log_variance - mean**2 - ops.exp(log_variance)).sum(1)
        return ops.binary_cross_entropy(drawn, ops.sigmoid(image)) + 0.1 * divergence.mean()


class Transformer(nn.Cell):
    """ViT in `mint`: pixels normalised by buffers, patches, a class token, fixed positions, smoothed labels."""

    def __init__(self, size=8, heads=2, patch=2, classes=4):
        super().__init__()
        self.heads, self.patch = heads, patch
        self.register_buffer("pixel_mean", Tensor(np.float32([0.5, 0.4, 0.3]).reshape(1, 3, 1, 1)))
        self.register_buffer("pixel_std", Tensor(np.float32([0.2, 0.3, 0.2]).reshape(1, 3, 1, 1)))
        angles = np.arange(5)[:, None] * 10.0 ** -np.arange(size // 2)
        self.positions = Tensor(np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32))
        self.token = Parameter(Tensor(np.zeros((1, 1, size), np.float32)), name="token")
        self.enter = mint.nn.Linear(3 * patch**2, size)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm((size,)) for _ in range(3))
        self.qkv, self.project = mint.nn.Linear(size, 3 * size), mint.nn.Linear(size, size)
        self.mlp = nn.SequentialCell(mint.nn.Linear(size, 2 * size), nn.GELU(), mint.nn.Linear(2 * size, size))
        self.head = mint.nn.Linear(size, classes)

    def construct(self, image, label):
        batch, channels, height, width = image.shape
        step, heads = self.patch, self.heads
        x = (image - self.pixel_mean) / self.pixel_std
        x = x.reshape(batch, channels, height // step, step, width // step, step).permute(0, 2, 4, 1, 3, 5)
        x = self.enter(x.reshape(batch, -1, channels * step * step))
        x = mint.cat((mint.broadcast_to(self.token, (batch, 1, x.shape[2])), x), 1) + self.positions
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, -1, 3, heads, x.shape[2] // heads).permute(2, 0, 3, 1, 4)
        scores = mint.nn.functional.softmax(mint.matmul(q, mint.transpose(k, -2, -1)) * 0.5, -1)
        x = x + self.project(mint.transpose(mint.matmul(scores, v), 1, 2).reshape(x.shape))
        x = x + self.mlp(self.norm2(x))
        return ops.cross_entropy(self.head(self.norm3(x)[:, 0]), label, label_smoothing=0.1)


class Views(nn.Cell):
    """SimCLR: two views of each image in one batch, unit vectors, every other image of the batch a negative."""

    def __init__(self, size=8, temperature=0.5):
        super().__init__()
        self.temperature = temperature
        self.encoder = nn.SequentialCell(nn.Conv2d(3, 4, 3, 2, has_bias=True), nn.ReLU())
        self.up, self.down = nn.Dense(4, size), nn.Dense(size, size)

    def construct(self, first, second):
        batch = first.shape[0]
        features = self.encoder(ops.cat((first, second), 0)).mean((2, 3))
        vectors = self.down(ops.relu(self.up(features)))
        vectors = vectors / ops.norm(vectors, dim=1, keepdim=True)
        logits = ops.matmul(vectors, vectors.T) / self.temperature
        logits = ops.masked_fill(logits, ops.eye(2 * batch, 2 * batch, ms.bool_), -1e9)
        partners = (ops.arange(2 * batch) + batch) % (2 * batch)
        return ops.cross_entropy(logits, partners.astype(ms.int32))
