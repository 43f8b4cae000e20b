"""One decoder for all families, as single-card code: its layers are made of what their `LayerSpec`s say.

Parameters are called as in Hugging Face's Llama.
"""

import mindspore as ms
from mindspore import nn, ops
from mindspore.common.initializer import Normal

from mindformers_core.layout import layout
from mindformers_core.models.attention import GroupedAttention, KeyValueCache
from mindformers_core.models.feed_forward import GatedMLP, PlainMLP, SparseMLP
from mindformers_core.models.latent_attention import LatentAttention
from mindformers_core.models.positions import LearnedPositions, places_seen
from mindformers_core.models.prediction import IGNORED, PredictionHead, labels_behind
from mindformers_core.models.rotary import rotary_tables
from mindformers_core.models.spec import LayerRange, ModuleSpec, build_module, routed_layers
from mindformers_core.tensor_parallel.fp8 import get_fp8_context
from mindformers_core.tensor_parallel.layers import (
    LayerNorm,
    RMSNorm,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    VocabParallelLinear,
    hidden_layout,
    sequence_entry,
    vocabulary_logits,
    without_columns,
)

ATTENTIONS = {"grouped": GroupedAttention, "latent": LatentAttention}
NORMS = {"rms": RMSNorm, "layer": LayerNorm}
MLPS = {"gated": GatedMLP, "plain": PlainMLP, "experts": SparseMLP}


class DecoderLayer(nn.Cell):
    """One decoder layer: attention and feed-forward block, each after a norm and added to its input.

    With experts, and `routed`, it has a second result, `routed` with what its router says, see `_pushed`.

    Args:
        config: of the layer, as a `LlamaConfig`; its `layer_spec(layer_number)` says which parts there are.
        layer_number: number of the layer in the whole model, from 1.
        attention, mlp, norm: classes of parts in the place of these.
    """

    def __init__(self, config, layer_number, attention=None, mlp=None, norm=None):
        super().__init__()
        self.layer_number, spec = layer_number, config.layer_spec(layer_number)
        weight_init, norm = Normal(config.initializer_range), norm or NORMS[spec.norm]
        settings = {"eps": spec.norm_eps, "dtype": getattr(ms, config.dtype)}
        self.input_layernorm = norm(config.hidden_size, **settings)
        self.self_attn = build_module(attention or ATTENTIONS[spec.attention], config, weight_init, spec=spec)
        self.post_attention_layernorm = norm(config.hidden_size, **settings)
        self.mlp = build_module(mlp or MLPS[spec.mlp], config, weight_init, spec=spec)

    def construct(self, hidden_states, cosines, sines, *seen, routed=None, counted=None):
        normed = self.input_layernorm(hidden_states)
        hidden_states = ops.add(hidden_states, self.self_attn(normed, cosines, sines, *seen))
        normed = self.post_attention_layernorm(hidden_states)
        if not isinstance(self.mlp, SparseMLP):
            return ops.add(hidden_states, self.mlp(normed))
        output, loss, counts = self.mlp(normed, counted)
        hidden_states = ops.add(hidden_states, output)
        return hidden_states if routed is None else (hidden_states, _pushed(routed, loss, counts))


def _pushed(routed, loss, counts):
    """What routers say, one behind the other, of the last ones: it is as long for all layers, which are one program."""
    own = ops.cat((ops.reshape(loss, (1,)), counts))
    return ops.cat((ops.narrow(routed, 0, own.shape[0], routed.shape[0] - own.shape[0]), own))


DECODER_LAYER = ModuleSpec(DecoderLayer)


class Decoder(nn.Cell):
    """The decoder without its output layer, or a stage of it in a pipeline.

    The input of the first stage is ids (batch, length), that of others hidden states (batch, length, hidden_size);
    the output is hidden states. Names of layers are their numbers in the whole model, from 0, so paths are the same in
    any pipeline. A stage builds its own layers only; its missing modules are None. `model_split_manual` makes a stage
    of a whole model by removing the other layers and modules. With `routed` that is the second result, see
    `DecoderLayer`.

    Args:
        config: a `LlamaConfig`.
        layer_spec: classes of a layer and its parts.
        layers: the `LayerRange` to build, see `split_layers`; None: the whole model.

    Attributes:
        is_first: whether the input is ids. The last stage has `embed_tokens`, too, if the output layer is tied.
        cache_length: number of slots of the layers' caches, where the model generates; else 0.
        order: see `share_sequences` of `CausalDecoder`.
    """

    def __init__(self, config, layer_spec=DECODER_LAYER, layers=None):
        super().__init__()
        self.config = config
        part = LayerRange(0, config.num_hidden_layers) if layers is None else layers
        dtype = getattr(ms, config.dtype)
        self.layer_offset, self.is_first = part.offset, part.is_first
        self.embed_tokens, self.embed_positions, self.norm, self.cache_length = None, None, None, 0
        self.order = (0,)
        if self.is_first or (part.is_last and (config.tie_word_embeddings or config.num_nextn_predict_layers)):
            weight_init = Normal(config.initializer_range)
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, weight_init, dtype)
        if self.is_first and config.learns_positions:
            self.embed_positions = LearnedPositions(config)
        numbers = range(1, part.count + 1)
        self.layers = nn.CellDict([(str(part.offset + n - 1), self.build_layer(layer_spec, n)) for n in numbers])
        if part.is_last:
            spec = config.layer_spec(config.num_hidden_layers)
            self.norm = NORMS[spec.norm](config.hidden_size, spec.norm_eps, dtype)

    def build_layer(self, layer_spec, layer_number):
        """The layer `layer_number` of this part, from 1 (RFC ICY7S6)."""
        global_layer_number = layer_number + self.layer_offset
        layer_config = self.config.get_config_for_layer(global_layer_number)
        with get_fp8_context(layer_config, global_layer_number - 1, is_init=True):
            return build_module(layer_spec, layer_config, global_layer_number)

    def construct(self, input_ids, positions=None, places=None, slots=None, starts=None, **routing):
        hidden_states = input_ids
        if self.is_first and self.embed_tokens is not None:
            hidden_states = self.embed_tokens(input_ids)
        length = input_ids.shape[1] if slots is None else self.cache_length
        own, seen = self.seen(length, positions, places, slots, starts)
        if self.embed_positions is not None:
            hidden_states = ops.add(hidden_states, self.embed_positions(length, own))
        for layer in self.layers.values():
            hidden_states = layer(hidden_states, *seen, slots, **routing)
            if isinstance(hidden_states, tuple):
                hidden_states, routing["routed"] = hidden_states
        hidden_states = hidden_states if self.norm is None else self.norm(hidden_states)
        return (hidden_states, routing["routed"]) if routing else hidden_states

    def seen(self, length, positions, places, slots=None, starts=None):
        """Positions of tokens, see `places_seen`, and what layers need of them: rotary tables and ranges of places."""
        config, cosines, sines = self.config, None, None
        if config.rotary_size:
            cosines, sines = rotary_tables(length, config.rotary_size, config.rope_theta, config.rope_scaling)
        own, ranges = places_seen(length, self.order, positions, places, slots, starts)
        if own is not None and config.rotary_size:
            cosines, sines = ops.gather(cosines, own, 0), ops.gather(sines, own, 0)
        return own, (cosines, sines, *ranges)


class CausalDecoder(nn.Cell):
    """The decoder with its output layer: ids (batch, length) → float logits (batch, length, vocab_size), or the loss.

    With shifted `labels` (batch, length) the output is the mean cross-entropy, a float32 scalar, over the labels other
    than -100; or its sum, and their number (int32). In training each label's loss has the sum of the routers' losses
    added, and with `loss="sum"` two more results, float32, the first ones 0, are these (1, 1 + layers with experts),
    times the number of labels, and how many choices each expert has got of tokens whose labels count, and with a
    capacity how many are dropped (1, 1 + layers with experts, experts or 1 + experts). Packed documents have
    `positions` (batch, length), int32, of each token in its own, which attention doesn't look beyond; tokens in another
    order than the row's have their `places` in it, likewise, or all rows have that of `share_sequences`. In a pipeline
    only the last stage has an output layer; the others return hidden states (batch, length, hidden_size), which replace
    ids as the input of the next, and what their routers say: stages behind the first are `RoutedStage`s then.

    In training `config.num_nextn_predict_layers` heads predict the tokens behind the next one. Their mean loss, times
    `config.mtp_loss_factor`, is added to each label's; both are means over the model's own labels.

    After `add_caches` the model generates: a call also takes the slots of its positions (length,), the same for all
    rows, and of every row its first slot that isn't padding, `starts` (batch,); logits are those of the last position,
    (batch, 1, vocab_size).

    Args:
        config: a `LlamaConfig`.
        layer_spec: classes of a layer and its parts.
        layers: the `LayerRange` to build, see `split_layers`; None: the whole model.
        loss: `"mean"` (default) or `"sum"`.
    """

    def __init__(self, config, layer_spec=DECODER_LAYER, layers=None, loss="mean"):
        super().__init__()
        self.model = Decoder(config, layer_spec, layers)
        self.is_tied, self.vocab_size = config.tie_word_embeddings, config.vocab_size
        self.lm_head = None
        if self.model.norm is not None and not self.is_tied:
            settings = {"weight_init": Normal(config.initializer_range), "dtype": getattr(ms, config.dtype)}
            self.lm_head = VocabParallelLinear(config.hidden_size, config.vocab_size, **settings)
        self.loss = VocabParallelCrossEntropy(loss=loss)
        self.routers, self.experts, self.columns = routed_layers(config)
        self.heads, self.head_loss = None, VocabParallelCrossEntropy(loss="sum")
        if self.model.norm is not None and config.num_nextn_predict_layers:
            numbers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
            made = ((str(number), PredictionHead(config, DecoderLayer(config, number + 1))) for number in numbers)
            self.heads, self.head_factor = nn.CellDict(list(made)), config.mtp_loss_factor / len(numbers)

    def decoder_layers(self):
        """All decoder layers, those of heads last."""
        heads = () if self.heads is None else self.heads.values()
        return *self.model.layers.values(), *(head.layer for head in heads)

    def share_sequences(self, order, algorithm):
        """Say how ranks share every sequence: the order in which its equal chunks lie, labels and positions as well,
        unless `places` say it, see `static_order`; and the algorithm of attention, see `attention`."""
        self.model.order = order
        for layer in self.decoder_layers():
            layer.self_attn.core_attention.algorithm = algorithm

    def share_heads(self, ranks, exchanged=1):
        """Say how many ranks share the heads of a layer, see `GroupedAttention`."""
        for layer in self.decoder_layers():
            if hasattr(layer.self_attn, "share_heads"):
                layer.self_attn.share_heads(ranks, exchanged)

    def mixtures(self):
        """The blocks here with experts that `after_step` counts, by number among those of the whole model."""
        layers = dict(self.model.layers.items()) | {name: head.layer for name, head in (self.heads or {}).items()}
        names = ((place, str(number - 1)) for place, number in enumerate(self.routers))
        return {place: layers[name].mlp for place, name in names if name in layers}

    def after_step(self, loss, labels, losses, counts):
        """Balance experts after the update of a step; the numbers of them that docs/models.md asks for.

        Args:
            loss, labels, losses, counts: results of all micro-batches, as of `loss="sum"`: sums, or joined along dim 0.
        """
        counts, found = ops.sum(counts, 0)[1:], {}
        if self.columns > 1 + self.experts:
            found["expert_overflow"], counts = ops.sum(counts[:, self.experts :]), counts[:, : self.experts]
        for place, block in self.mixtures().items():
            block.gate.balance(counts[place])
        found["expert_load"] = ops.amax(ops.div(ops.amax(counts, -1), ops.mean(counts, -1)))
        return found | {"router_loss": ops.div(ops.sum(losses), ops.maximum(labels, 1)), "expert_counts": counts}

    def add_caches(self, batch, length):
        """Give every layer a `KeyValueCache` of `length` slots for `batch` rows."""
        self.model.cache_length = length
        for layer in self.model.layers.values():
            attention, dtype = layer.self_attn, getattr(ms, self.model.config.dtype)
            attention.cache = KeyValueCache(length, batch, *attention.cache_sizes, dtype)
        for path, parameter in self.parameters_and_names():
            parameter.name = path  # graphs need names of their own

    def shard(self, config=None):
        """Layouts of the batch, sharded over `config.batch_axes`, each sequence over `config.sequence_axes`; without
        these axes as the inputs arrive.

        Hidden states between stages have the layout that the layers use, so no collective is added.
        """
        axes, sequence_axes = (getattr(config, name, None) for name in ("batch_axes", "sequence_axes"))
        rows, tokens = (... if each is None else each for each in (axes, sequence_axes))
        batch = None if rows is tokens is ... else layout(rows, tokens)
        hidden = hidden_layout(config) if axes is None else layout(axes, *(sequence_entry(config) or (None,)), None)
        is_first = self.model.is_first and self.model.embed_tokens is not None
        inputs = {"input_ids": batch if is_first else hidden, "labels": batch, "positions": batch, "places": batch}
        if self.model.cache_length:
            inputs |= {"slots": layout(None), "starts": None if axes is None else layout(axes)}
        return inputs, hidden if self.model.norm is None else None, None

    def construct(self, input_ids, labels=None, positions=None, places=None, slots=None, starts=None, routed=None):
        routing = self._routing(labels, routed)
        hidden_states = self.model(input_ids, positions, places, slots, starts, **routing)
        if routing:
            hidden_states, routed = hidden_states
        if slots is not None and self.model.norm is not None:
            hidden_states = hidden_states[:, -1:]
        if self.model.norm is None:
            return (hidden_states, routed) if routing else hidden_states
        logits = self.logits(hidden_states)
        if labels is None:
            return without_columns(logits, self.vocab_size)
        loss = self.loss(logits, labels)
        if self.heads is not None and self.training:
            further, routed = self.head_losses(hidden_states, labels, positions, places, routed)
            loss = self._with_heads(loss, labels, ops.mul(further, self.head_factor))
        return self._with_routers(loss, routed) if self.routers else loss

    def _with_heads(self, found, labels, further):
        """The results with the losses of heads, a sum over labels, added."""
        if isinstance(found, tuple):
            return ops.add(found[0], further), found[1]
        count = ops.sum(ops.cast(ops.not_equal(labels, IGNORED), ms.float32))
        return ops.add(found, ops.div(further, count))

    def logits(self, hidden_states):
        """Those of normed hidden states, perhaps with columns of padding."""
        if self.lm_head is not None:
            return self.lm_head(hidden_states)
        return vocabulary_logits(hidden_states, self.model.embed_tokens.weight)

    def head_losses(self, hidden_states, labels, positions, places, routed):
        """The sum of the losses of all heads, and `routed` behind them. What a head is told of the next token is its
        label, where one counts."""
        _, seen = self.model.seen(labels.shape[1], positions, places)
        losses = []
        for head in self.heads.values():
            embedded = self.model.embed_tokens(ops.masked_fill(labels, ops.equal(labels, IGNORED), 0))
            labels = labels_behind(labels, seen[4])
            hidden_states = head(hidden_states, embedded, *seen, **self._routing(labels, routed))
            if isinstance(hidden_states, tuple):
                hidden_states, routed = hidden_states
            losses.append(self.head_loss(self.logits(hidden_states), labels)[0])
        return sum(losses[1:], losses[0]), routed

    def _routing(self, labels, routed):
        """What layers get for their routers, if there are any: what those before have said, and which tokens count."""
        if labels is None or not self.routers:
            return {}
        if routed is None:
            routed = ops.zeros(((1 + len(self.routers)) * self.columns,), ms.float32)
        counted = ops.not_equal(labels, self.loss.ignore_index)
        return {"routed": routed, "counted": ops.cast(counted, ms.float32)}

    def _with_routers(self, found, routed):
        """The results, see the class."""
        routed = ops.reshape(routed, (-1, self.columns))
        losses, counts = ops.squeeze(ops.narrow(routed, 1, 0, 1), 1), ops.narrow(routed, 1, 1, self.columns - 1)
        if not isinstance(found, tuple):
            return ops.add(found, ops.sum(losses)) if self.training else found
        losses = ops.mul(losses, ops.cast(found[1], ms.float32))
        loss = ops.add(found[0], ops.sum(losses)) if self.training else found[0]
        return loss, found[1], ops.expand_dims(losses, 0), ops.expand_dims(counts, 0)


class RoutedStage(CausalDecoder):
    """A stage behind the first one of a pipeline of a model with experts: hidden states and `routed` of the
    stage before, instead of ids. A model that generates passes on hidden states alone."""

    uncast = (1,)  # counts and losses stay float32 where the stage computes in half precision

    def shard(self, config=None):
        inputs, outputs, weights = super().shard(config)
        return inputs | {"routed": layout(None)}, outputs, weights

    def construct(
        self, input_ids, routed=None, labels=None, positions=None, places=None, slots=None, starts=None
    ):  # fmt: skip
        if labels is not None and routed is None:
            raise TypeError("a later stage that trains experts needs routed, the counts and losses of the stage before")
        return super().construct(input_ids, labels, positions, places, slots, starts, routed)


def decoder_for_training(config, layers=None):
    """A `CausalDecoder` or `RoutedStage` that returns the sum of the losses, and the number of labels."""
    is_first = layers is None or layers.is_first
    kind = CausalDecoder if is_first or not routed_layers(config)[0] else RoutedStage
    return kind(config, layers=layers, loss="sum")
