"""The numbers that define a Llama-style model, named as in Hugging Face's `config.json`. Pure Python."""

from dataclasses import dataclass, fields

from mindformers_core.mesh import nearest

__all__ = ["LlamaConfig"]

_DTYPES = ("float32", "float16", "bfloat16")
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "pipeline_parallel",
    "virtual_pipeline",
)


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama-style decoder and the part of it that this process holds. Checked when made.

    Attributes:
        vocab_size: number of token ids.
        hidden_size: size of the residual stream.
        intermediate_size: size inside the feed-forward block.
        num_hidden_layers: number of decoder layers of the whole model.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key and value heads; default: as many as query heads.
        head_dim: size of one head; default: `hidden_size / num_attention_heads`.
        max_position_embeddings: longest sequence.
        rms_norm_eps: added to the mean square in the norms.
        rope_theta: base of the rotary frequencies.
        tie_word_embeddings: whether the output layer uses the embedding's weight.
        initializer_range: standard deviation of the initial weights.
        dtype: of parameters and computation: float32, float16 or bfloat16.
        pipeline_parallel: number of ranks that the layers are spread over.
        pipeline_rank: which of them this is, from 0.
        virtual_pipeline: number of model chunks on each of them.

    Raises:
        TypeError, ValueError: a value of the wrong type, out of range, or that doesn't fit another one.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: str = "float32"
    pipeline_parallel: int = 1
    pipeline_rank: int = 0
    virtual_pipeline: int = 1

    def __post_init__(self):
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for name in _COUNTS:
            if name != "head_dim" or self.head_dim is not None:
                _check_count(name, getattr(self, name))
        if self.head_dim is None:
            _check_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        self._check_numbers()
        self._check_fit()

    def _check_numbers(self):
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}: expected a number, not {value!r}")
            if value <= 0:
                raise ValueError(f"{name}: {value} should be greater than 0")
        if not isinstance(self.tie_word_embeddings, bool):
            raise TypeError(f"tie_word_embeddings: expected true or false, not {self.tie_word_embeddings!r}")
        if self.dtype not in _DTYPES:
            allowed = ", ".join(_DTYPES)
            raise ValueError(f"dtype: {self.dtype!r} should be one of {allowed}{nearest(self.dtype, _DTYPES)}")

    def _check_fit(self):
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _check_divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} should be even: rotary embedding turns pairs of values")
        chunks = self.pipeline_parallel * self.virtual_pipeline
        _check_divides("num_hidden_layers", self.num_hidden_layers, "pipeline_parallel * virtual_pipeline", chunks)
        rank = self.pipeline_rank
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.pipeline_parallel:
            raise ValueError(f"pipeline_rank: {rank!r} should be an int from 0 to {self.pipeline_parallel - 1}")
        if self.tie_word_embeddings and self.pipeline_parallel > 1:
            raise ValueError(
                f"tie_word_embeddings: embedding and output layer are on different stages of pipeline_parallel="
                f"{self.pipeline_parallel} and can't share a weight: set it to false, or pipeline_parallel to 1"
            )

    @classmethod
    def from_dict(cls, values):
        """A config from a dict by attribute name, as a recipe or a `config.json` has it.

        Raises:
            ValueError: an unknown key, with the nearest known one.
        """
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                allowed = ", ".join(known)
                raise ValueError(f"unknown key '{key}' in the model's config{nearest(key, known)}; known: {allowed}")
        return cls(**values)


def _check_count(name, value):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, not {value!r}")
    if value < 1:
        raise ValueError(f"{name}: {value} should be at least 1")


def _check_divides(name, value, divisor_name, divisor):
    if value % divisor:
        below = value - value % divisor
        near = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise ValueError(f"{name}: {value} should be a multiple of {divisor_name} ({divisor}): for example {near}")
