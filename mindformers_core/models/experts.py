"""A mixture of experts: a router, experts of which each token chooses some, and shared ones. Single-card code.

Losses and statistics of the router are computed of all tokens, as on one card, on every mesh.
"""

from dataclasses import dataclass

import mindspore as ms
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Normal, initializer

from mindformers_core.communication.local import first_numbers
from mindformers_core.hints import nearest
from mindformers_core.layout import layout
from mindformers_core.ranges import bounded, check_fields
from mindformers_core.tensor_parallel.experts import experts, within_capacity
from mindformers_core.tensor_parallel.layers import cast_to

_SCORES = ("softmax", "sigmoid")
_LEAST = 1e-20  # added to a sum of weights that may be 0
_LOWEST = -3e38


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    Attributes:
        num_experts: number of experts of a layer.
        num_experts_per_tok: number that each token chooses.
        scores: of the experts for a token: `"softmax"` (default) or `"sigmoid"` of the router's logits.
        norm_topk_prob: whether the weights of a token's choices are divided by their sum. Default: True.
        routed_scaling_factor: multiplies the weights. Default: 1.
        n_group, topk_group: experts are in `n_group` equal groups, and a token chooses among those of `topk_group`
            groups (DeepSeek-AI, "DeepSeek-V3", arXiv 2412.19437): those with the highest sum of two scores. Default: 1,
            a single group.
        has_bias: whether experts are chosen by their scores and a bias, which balances them; weights are without it.
            Default: False.
        bias_update_rate: the rate of `balanced`, by which each step of a `Trainer` changes the bias. Default: 0.
        aux_loss_coef: of the loss E / (T K) · Σ_i count_i · mean_i over all T tokens of a call, where mean_i is the
            expert's mean share of the scores (Fedus, Zoph, Shazeer, "Switch Transformers", arXiv 2101.03961).
            Default: 0.
        seq_aux_loss_coef: of the same loss of each row, the mean over rows, weighted by their tokens. Default: 0.
        z_loss_coef: of the mean square of the logits' logsumexp (Zoph et al., "ST-MoE", arXiv 2202.08906). Default: 0.

    Raises:
        TypeError, ValueError: a value of the wrong type, out of range, or in contradiction to another one.
    """

    num_experts: int = bounded(8, 1, 2**16)
    num_experts_per_tok: int = bounded(2, 1, 2**10)
    scores: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = bounded(1.0, above=0, at_most=1e4)
    n_group: int = bounded(1, 1, 2**10)
    topk_group: int = bounded(1, 1, 2**10)
    has_bias: bool = False
    bias_update_rate: float = bounded(0.0, 0, 1)
    aux_loss_coef: float = bounded(0.0, 0, 1e4)
    seq_aux_loss_coef: float = bounded(0.0, 0, 1e4)
    z_loss_coef: float = bounded(0.0, 0, 1e4)

    def __post_init__(self):
        check_fields(self)
        if self.scores not in _SCORES:
            raise ValueError(
                f"scores: {self.scores!r} should be one of {', '.join(_SCORES)}{nearest(self.scores, _SCORES)}"
            )
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"n_group: {self.n_group} should divide num_experts {self.num_experts}, and be at least topk_group "
                f"{self.topk_group}"
            )
        most = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > most:
            raise ValueError(
                f"num_experts_per_tok: {self.num_experts_per_tok} should be at most {most}, the experts of "
                f"{self.topk_group} of {self.n_group} groups"
            )


class Router(nn.Cell):
    """Hidden states (…, hidden_size) → the experts chosen, int32 (…, K), and their weights, float32 (…, K); the loss, a
    float32 scalar, already with its coefficients; and how many choices each expert has got, float32 (E,).

    With `counted` (…), float32 of zeros and ones, tokens with a zero are left out of the loss and the counts.

    Everything is computed in float32. Of equal scores the first ones are chosen.

    Args:
        hidden_size: size of the last dim.
        config: a `RouterConfig`.
        weight_init: initializer of the weight. Default: Normal(0.02).
        dtype: of the weight. Default: float32.

    Attributes:
        weight: (E, hidden_size).
        e_score_correction_bias: float32 (E,), without a gradient, see `balanced`; None where there is none.
    """

    def __init__(self, hidden_size, config, weight_init=None, dtype=ms.float32):
        super().__init__()
        self.config = config
        weight_init = Normal(0.02) if weight_init is None else weight_init
        self.weight = Parameter(initializer(weight_init, (config.num_experts, hidden_size), dtype))
        self.e_score_correction_bias = None
        if config.has_bias:
            zeros = initializer("zeros", (config.num_experts,), ms.float32)
            self.e_score_correction_bias = Parameter(zeros, requires_grad=False)
            self.e_score_correction_bias.is_state = True

    def shard(self, config=None):
        """All ranks have the whole weight; each routes its own tokens."""
        weights = {"weight": layout(None, None)}
        if self.e_score_correction_bias is not None:
            weights["e_score_correction_bias"] = layout(None)
        return None, None, weights

    def balance(self, counts):
        """After a step with so many choices of experts (E,): the bias of a router that is trained is `balanced`."""
        rate, held = self.config.bias_update_rate, [*self.get_parameters(expand=False)]
        if rate and any(each.requires_grad for each in held):
            for bias in (each for each in held if getattr(each, "is_state", False)):
                ops.assign(bias, balanced(bias, counts, rate))

    def construct(self, hidden_states, counted=None):
        config = self.config
        logits = ops.dense(cast_to(hidden_states, ms.float32), cast_to(self.weight, ms.float32))
        scores = ops.softmax(logits, -1) if config.scores == "softmax" else ops.sigmoid(logits)
        ids = self._chosen(ops.stop_gradient(scores))
        weights = ops.gather_elements(scores, -1, ids)
        if config.norm_topk_prob:
            weights = ops.div(weights, ops.add(ops.sum(weights, -1, keepdim=True), _LEAST))
        if config.routed_scaling_factor != 1:
            weights = ops.mul(weights, config.routed_scaling_factor)
        chosen = ops.sum(_one_hot(ids, config.num_experts), -2)
        if counted is not None:
            chosen = ops.mul(chosen, ops.expand_dims(counted, -1))
        counts = ops.sum(chosen, tuple(range(chosen.ndim - 1)))
        loss = self._loss(logits, scores, chosen, counts, counted)
        return ids, weights, loss, counts

    def _chosen(self, scores):
        """The experts with the highest scores, the highest first."""
        config = self.config
        if self.e_score_correction_bias is not None:
            scores = ops.add(scores, ops.stop_gradient(self.e_score_correction_bias))
        if config.topk_group < config.n_group:
            grouped = ops.reshape(scores, (*scores.shape[:-1], config.n_group, -1))
            best, _ = ops.topk(grouped, min(2, grouped.shape[-1]))
            taken = _first(ops.sum(best, -1), config.topk_group)
            is_taken = ops.expand_dims(ops.sum(_one_hot(taken, config.n_group), -2), -1)
            grouped = ops.where(ops.greater(is_taken, 0.5), grouped, _LOWEST)
            scores = ops.reshape(grouped, scores.shape)
        return _first(scores, config.num_experts_per_tok)

    def _loss(self, logits, scores, chosen, counts, counted):
        config, loss, dims = self.config, ops.zeros((), ms.float32), tuple(range(scores.ndim - 1))
        if not (config.aux_loss_coef or config.seq_aux_loss_coef or config.z_loss_coef):
            return loss
        share = scores if config.scores == "softmax" else ops.div(scores, ops.sum(scores, -1, keepdim=True))
        square = ops.square(ops.logsumexp(logits, -1))
        if counted is not None:
            share, square = ops.mul(share, ops.expand_dims(counted, -1)), ops.mul(square, counted)
        tokens, factor = self._tokens(counts), config.num_experts / config.num_experts_per_tok
        if config.aux_loss_coef:
            both = ops.div(ops.sum(ops.mul(counts, ops.sum(share, dims))), ops.square(tokens))
            loss = ops.add(loss, ops.mul(both, factor * config.aux_loss_coef))
        if config.seq_aux_loss_coef:
            chosen = ops.sum(chosen, dims[1:])
            both = ops.sum(ops.mul(chosen, ops.sum(share, dims[1:])), -1)
            both = ops.div(ops.sum(ops.div(both, self._tokens(chosen))), tokens)
            loss = ops.add(loss, ops.mul(both, factor * config.seq_aux_loss_coef))
        if config.z_loss_coef:
            loss = ops.add(loss, ops.mul(ops.div(ops.sum(square), tokens), config.z_loss_coef))
        return loss

    def _tokens(self, counts):
        """The number of the tokens that count, at least 1, by the counts (…, E) of their choices."""
        return ops.maximum(ops.div(ops.sum(counts, -1), self.config.num_experts_per_tok), 1.0)


class RoutedExperts(nn.Cell):
    """The experts of a layer: hidden states (…, H), ids and weights (…, K) → (…, H), see `experts`.

    Args:
        num_experts, hidden_size, intermediate_size: E, H and I.
        has_bias: whether experts have biases. Default: False.
        activation, capacity: as of `experts`. Default: `"silu"` and none.
        weight_init: initializer of the weights. Default: Normal(0.02).
        dtype: of the parameters. Default: float32.

    Attributes:
        gate_up_proj: (E, 2, I, H), gates first.
        down_proj: (E, H, I).
        gate_up_proj_bias, down_proj_bias: (E, 2, I) and (E, H), or None.
        moved_by: int32 (E,), by how much the place of each expert in these is more than its number; None: all 0.
    """

    def __init__(
        self, num_experts, hidden_size, intermediate_size, has_bias=False, activation="silu", capacity=None,
        weight_init=None, dtype=ms.float32,
    ):  # fmt: skip
        super().__init__()
        self.activation, self.capacity, self.num_experts, self.moved_by = activation, capacity, num_experts, None

        def declared(init, *shape):
            return Parameter(initializer(init, (num_experts, *shape), dtype))

        weight_init = Normal(0.02) if weight_init is None else weight_init
        self.gate_up_proj = declared(weight_init, 2, intermediate_size, hidden_size)
        self.down_proj = declared(weight_init, hidden_size, intermediate_size)
        self.gate_up_proj_bias = declared("zeros", 2, intermediate_size) if has_bias else None
        self.down_proj_bias = declared("zeros", hidden_size) if has_bias else None

    def shard(self, config=None):
        """Experts are sharded over `config.expert_parallel`, their inner dim over `config.expert_tensor_parallel`."""
        each, inner = (getattr(config, name, None) or None for name in ("expert_parallel", "expert_tensor_parallel"))
        weights = {"gate_up_proj": layout(each, None, inner, None), "down_proj": layout(each, None, inner)}
        if self.down_proj_bias is not None:
            weights |= {"gate_up_proj_bias": layout(each, None, inner), "down_proj_bias": layout(each, None)}
        return None, None, weights | ({} if self.moved_by is None else {"moved_by": layout(None)})

    def let_move(self):
        """Let experts lie in other places than their numbers', for `moe.placement`; before `shard()`."""
        self.moved_by = Parameter(initializer("zeros", (self.num_experts,), ms.int32), requires_grad=False)
        self.moved_by.is_state, self.moved_by.persistent = True, False

    def construct(self, hidden_states, ids, weights):
        if self.moved_by is not None:
            ids = ops.add(ids, ops.gather(self.moved_by, ids, 0))
        held = self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias
        return experts(hidden_states, ids, weights, *held, self.activation, self.capacity)


class MixtureOfExperts(nn.Cell):
    """Hidden states (…, hidden_size) → what a token's experts make of it, of the same shape; the router's loss; and
    how many choices each expert has got (E,), with a capacity also how many are dropped (E + 1,); with `counted` as of
    `Router`.

    Args:
        router, experts: a `Router` and `RoutedExperts`.
        shared: a Cell of hidden states whose result is added, or None.
    """

    def __init__(self, router, experts, shared=None):
        super().__init__()
        self.gate, self.experts, self.shared_experts = router, experts, shared

    def construct(self, hidden_states, counted=None):
        ids, weights, loss, counts = self.gate(hidden_states, counted)
        output = self.experts(hidden_states, ids, weights)
        if self.shared_experts is not None:
            output = ops.add(output, self.shared_experts(hidden_states))
        return output, loss, counts if self.experts.capacity is None else self._with_dropped(counts, ids, counted)

    def _with_dropped(self, counts, ids, counted):
        kept = within_capacity(ids, self.gate.config.num_experts, self.experts.capacity)
        dropped = ops.sum(ops.cast(ops.not_equal(kept, ids), ms.float32), -1)
        dropped = ops.sum(dropped if counted is None else ops.mul(dropped, counted))
        return ops.cat((counts, ops.reshape(dropped, (1,))))


def balanced(bias, counts, rate):
    """The bias (E,) of a router after a step in which experts had so many choices (E,) of all tokens.

    It rises by `rate` for experts below the mean, and falls for those above (Wang et al., "Auxiliary-Loss-Free Load
    Balancing", arXiv 2408.15664).
    """
    return bias + rate * ops.sign(ops.mean(counts) - counts)


def _one_hot(ids, count):
    return ops.cast(ops.equal(ops.expand_dims(ids, -1), first_numbers(count)), ms.float32)


def _first(scores, count):
    """The places of the highest scores of the last dim, int32; of equal ones, the first."""
    return ops.cast(ops.narrow(ops.argsort(ops.neg(scores), -1), -1, 0, count), ms.int32)
