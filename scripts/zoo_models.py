"""The models of other libraries, made small: mindone.transformers, mindcv, MindSpore Transformers 1.3. See `zoo.py`."""

import importlib.abc
import importlib.machinery
import inspect
import re
import sys
from collections import OrderedDict
from contextlib import ExitStack
from functools import wraps
from unittest.mock import MagicMock

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindformers_core.scopes import replaced

SIZES = {  # pattern of an attribute's name in a configuration -> its value
    r"(n|num)_(hidden_)?layers?|(encoder|decoder|num_encoder|num_decoder|depth)_layers|depth|layers|num_blocks": 2,
    r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|hidden_dim|projection_dim|d_embed|"
    r"vision_embed_dim|bottleneck_size|encoder_hidden_size|rnn_hidden_dim|lm_hidden_dim|dec_dim|text_dim|"
    r"vocab_embedding_dim|(shape|pronunciation)_embed_dim|emb_dim|"
    r"codevector_dim|proj_codevector_dim|tie_dim|q_lora_rank|kv_lora_rank": 32,
    r"(num|n|encoder|decoder|num_encoder|num_decoder)_(attention_)?heads?|attention_heads": 4,
    r"(num|n)_(key_value_heads|kv_heads|head_kv|query_groups|kv_head)|multi_query_group_num": 2,
    r"(.*_)?intermediate_size|(.*_)?ffn_(dim|hidden_size)|d_ff|d_inner|n_inner|inner_dim|feed_forward_proj_dim|"
    r"ffn_size|shared_expert_intermediate_size|expert_dim|mlp_dim": 64,
    r"vocab_size|(text|type)_vocab_size_|(shape|pronunciation)_vocab_size|"
    r"n_vocab|num_embeddings|entity_vocab_size|codebook_size": 128,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len(gth)?|max_source_positions|max_target_positions|"
    r"max_2d_position_embeddings|max_sequence_length": 128,
    r"head_dim|d_kv|kv_channels|attention_head_size|qk_nope_head_dim|qk_rope_head_dim|v_head_dim": 8,
    r"image_size|img_size|input_size": 32,
    r"patch_size": 8,
    r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts": 4,
    r"num_experts_per_tok|moe_k|num_selected_experts|moe_topk": 2,
    r"pad_token_id|padding_idx": 0,
    r"base_channels": 32,
    r"num_lables|num_classes": 8,
    r"(bos|eos|sep|cls|mask|unk|decoder_start|image|video|audio)_token_(id|index)": 3,
}
SMALLER = {  # module of mindcv -> arguments of its Cell
    "coat": {"embed_dims": [32] * 4, "parallel_depth": 2},
    "cmt": {"img_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [32, 64, 96, 128]},
    "convnext": {"dims": [32, 64, 96, 128]},
    "crossvit": {"embed_dim": [28, 56], "depth": [[1, 1, 0], [1, 1, 0]]},
    "densenet": {"block_config": (2, 2, 2, 2)},
    "dpn": {"k_r": 32, "k_sec": (2, 2, 2, 2)},
    "bit": {"layers": [1, 1, 1, 1]},
    "inceptionv3": {"aux_logits": False},
    "halonet": {"depth_list": [1, 1, 1, 1]},
    "mae": {
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 4,
        "decoder_embed_dim": 64,
        "decoder_depth": 2,
        "decoder_num_heads": 4,
    },
    "mlpmixer": {"depth": 2, "n_channels": 64, "token_dim": 32, "channel_dim": 64},
    "repmlp": {
        "channels": (32,) * 4,
        "num_blocks": (1,) * 4,
        "hs": (16, 8, 4, 2),
        "ws": (16, 8, 4, 2),
        "sharesets_nums": (4,) * 4,
    },
    "swintransformer": {"embed_dim": 24, "depths": [2, 2]},
    "swintransformerv2": {"embed_dim": 24, "depths": [2, 2]},
    "vit": {"embed_dim": 64, "depth": 2, "num_heads": 4},
}
NARROWER = "densenet dpn googlenet hrnet inceptionv3 inceptionv4 mobilenetv1 mobilenetv2 mobilenetv3 resnest"
NARROWER += " resnet resnetv2 senet squeezenet vgg xception"  # modules of mindcv: fewer channels
IMAGES = {
    "convit": 224,
    "inceptionv3": 128,
    "swintransformer": 224,
    "inceptionv4": 128,
    "mlpmixer": 224,
}  # pixels of a side, of those whose arguments don't say
FEW = "xx_small|xxs|tiny|_ti$|nano|atto|s12|_s_p32|b0|050|075|025|small|18$|121|92|_9$|11$|200mf|_a0|14$|05$|50"


def small(config_class):
    """A small configuration of a class, for each of its numbers that `SIZES` knows."""
    return config_class(**_small_values(config_class()))


def _small_values(config):
    found, is_in_stages = {}, isinstance(getattr(config, "num_heads", None), (list, tuple))
    for name, value in vars(config).items():
        if hasattr(value, "model_type") and not name.startswith("_"):
            found[name] = {"model_type": value.model_type, **_small_values(value)}
        elif isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif name in ("depth", "depths") and isinstance(value, (list, tuple)):
            found[name] = [min(count, 2 if name == "depths" else 3) for count in value]
        elif name in ("hidden_sizes", "embed_dim") and config.model_type in ("cvt", "poolformer", "pvt", "pvt_v2"):
            found[name] = [size // 4 for size in value]
        elif name in ("block_size", "num_global_tokens") and config.model_type == "pegasus_x":
            found[name] = 4
        elif type(value) is int and not (name in ("embed_dim", "hidden_size") and is_in_stages):
            sizes = [size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)]
            found.update({name: sizes[0]} if sizes else {})
    return found


def inputs_for(names, config):
    """Small inputs by name, for the names of a `construct` that are known."""
    draw, vision = np.random.default_rng(0), getattr(config, "vision_config", config)
    tokens = lambda: Tensor(draw.integers(4, 100, (4, 4)), ms.int32)  # noqa: E731
    floats = lambda *shape: Tensor(draw.standard_normal(shape).astype(np.float32))  # noqa: E731
    size, channels = getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3)
    size = size if isinstance(size, int) else size[0]
    bins = getattr(config, "num_mel_bins", 80)
    known = {
        "input_ids": tokens,
        "decoder_input_ids": tokens,
        "attention_mask": lambda: Tensor(np.ones((4, 4)), ms.int32),
        "bbox": lambda: Tensor(np.tile([1, 2, 5, 9], (4, 4, 1)), ms.int32),
        "pixel_values": lambda: floats(4, channels, size, size),
        "input_values": lambda: floats(4, 800),
        "input_features": lambda: floats(4, bins, 64) if "decoder_input_ids" in names else floats(4, 64, bins),
    }
    given = {name: make() for name, make in known.items() if name in names}
    if "input_ids" not in given and "decoder_input_ids" not in given:
        given.pop("attention_mask", None)
    switches = {"use_cache": False, "return_dict": False}
    return given | {name: value for name, value in switches.items() if name in names}


def mindone():
    """Model -> function that makes a Cell and its inputs, one for each module of mindone.transformers."""
    import mindone.transformers as library
    from mindone.transformers.modeling_utils import PreTrainedModel

    PreTrainedModel._init_weights = PreTrainedModel._initialize_weights = PreTrainedModel.init_weights = _none
    found = {}
    for name in dir(library):
        kind = getattr(library, name)
        if isinstance(kind, type) and issubclass(kind, nn.Cell) and getattr(kind, "config_class", None):
            module, whole = kind.__module__.split(".")[-2], re.search(r"Model$|ForCausalLM$", name)
            if whole and "PreTrained" not in name and "Pretrained" not in name:
                best = found.get(module)
                rank = (not name.endswith("Model"), len(name))
                if best is None or rank < best[0]:
                    found[module] = rank, kind

    def maker(kind):
        def make():
            config = small(kind.config_class)
            if hasattr(config, "_attn_implementation"):
                config._attn_implementation = "eager"
            return kind(config), (), inputs_for(inspect.signature(kind.construct).parameters, config)

        return make

    return {module: maker(kind) for module, (_, kind) in found.items()}


def _smaller(module):
    """A context in which the Cell of a module of mindcv is built with the arguments of `SMALLER`."""
    stack, changes = ExitStack(), SMALLER.get(module, {})
    for kind in vars(sys.modules[f"mindcv.models.{module}"]).values():
        if changes and isinstance(kind, type) and changes.keys() <= inspect.signature(kind.__init__).parameters.keys():
            stack.enter_context(replaced(kind, __init__=_with(kind.__init__, lambda _: changes)))
    for kind in (nn.Conv2d, nn.BatchNorm2d, nn.Dense) if module in NARROWER else ():
        stack.enter_context(replaced(kind, __init__=_with(kind.__init__, _narrowed)))
    return stack


def _with(build, changes_of):
    """A constructor with some of its arguments exchanged: `changes_of` them all."""
    signature = inspect.signature(build)

    def changed(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(changes_of(bound.arguments))
        build(*bound.args, **bound.kwargs)

    return wraps(build)(changed)


def _narrowed(given):
    """The arguments of a layer with a quarter of its channels."""
    names = given.keys() & {"in_channels", "out_channels", "num_features", "group"}
    found = {name: given[name] // 4 if given[name] >= 16 and given[name] % 4 == 0 else given[name] for name in names}
    if "group" in found and found["in_channels"] % found["group"]:
        found["group"] = found["in_channels"]
    return found


def mindcv():
    """As `mindone`, the smallest model of each module of mindcv."""
    import mindcv as library
    from mindcv.models.registry import _module_to_models

    def maker(module, name):
        def make():
            sizes = re.findall(r"(?:224|256|384)", name)
            with _smaller(module):
                size = IMAGES.get(module, 64)
                try:
                    net = library.create_model(name, num_classes=10, image_size=size)
                except TypeError:
                    net, size = library.create_model(name, num_classes=10), int(sizes[0]) if sizes else size
            if module == "vgg":
                net.classifier = nn.Dense(512, 10)
            image = np.random.default_rng(0).standard_normal((4 if size <= 128 else 2, 3, size, size))
            return net if module in ("repmlp", "res2net") else shortened(net), (Tensor(image.astype(np.float32)),), {}

        return make

    rank = {name: place for place, name in enumerate(FEW.split("|"))}
    found = {}
    for module, names in sorted(_module_to_models.items()):
        order = lambda name: (min([p for s, p in rank.items() if re.search(s, name)], default=99), len(name), name)  # noqa: E731
        found[module] = maker(module, min(names, key=order))
    return found


def shortened(net):
    """A Cell in which of each run of layers of one class, with Parameters of the same shapes, two are left."""
    for _, cell in net.cells_and_names():
        if isinstance(cell, (nn.CellList, nn.SequentialCell)):
            kept, keys = [], []
            for layer in cell._cells.items():
                key = type(layer[1]), tuple(parameter.shape for parameter in layer[1].get_parameters())
                if not key[1] or keys[-2:] != [key, key]:
                    kept, keys = [*kept, layer], [*keys, key]
            named = ((str(at) if name.isdigit() else name, layer) for at, (name, layer) in enumerate(kept))
            cell._cells = OrderedDict(named)
            if isinstance(cell, nn.SequentialCell):
                cell.cell_list = list(cell._cells.values())
    return net


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for packages of data and metrics that MindSpore Transformers imports, and no model calls."""

    absent = {
        "pyarrow",
        "datasets",
        "rouge_chinese",
        "jieba",
        "nltk",
        "cv2",
        "ftfy",
        "sentencepiece",
        "tiktoken",
        "mindpet",
    }

    def find_spec(self, name, path=None, target=None):
        """See `MetaPathFinder`."""
        is_absent = name.split(".")[0] in self.absent or name.startswith("mindformers.dataset")
        return importlib.machinery.ModuleSpec(name, self) if is_absent else None

    def create_module(self, spec):
        """See `Loader`."""
        module = MagicMock()
        module.__path__, module.__spec__, module.__all__ = [], spec, []
        return module

    def exec_module(self, module):
        """See `Loader`."""


def _import_past_names_that_are_gone(name):
    """A module of a library for an older MindSpore; names that the present one lacks are empty classes."""
    while True:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing = re.search(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
            if missing is None:
                raise
            setattr(sys.modules[missing[2]], missing[1], type(missing[1], (), {}))
            root = name.partition(".")[0]
            for loaded in [each for each in sys.modules if each == root or each.startswith(f"{root}.")]:
                del sys.modules[loaded]


def mindformers():
    """As `mindone`, of MindSpore Transformers 1.3, as its configurations make them: computing in float16."""
    sys.meta_path.insert(0, _Absent())
    library = _import_past_names_that_are_gone("mindformers.models")
    names = "LlamaForCausalLM GPT2LMHeadModel BloomLMHeadModel BertForPreTraining GLMForPreTraining"
    names += " T5ForConditionalGeneration"
    names += (
        " ChatGLM2ForConditionalGeneration PanguAlphaHeadModel ViTForImageClassification SwinForImageClassification"
    )
    names += " ViTMAEForPreTraining CLIPModel WhisperForConditionalGeneration SamImageEncoder"

    def maker(kind):
        def make():
            values = _small_values(kind.config_class()) | {
                "batch_size": 4,
                "seq_length": 8,
                "use_flash_attention": False,
            }
            config = kind.config_class(**values)
            names, draw = inspect.signature(kind.construct).parameters, np.random.default_rng(0)
            tokens = lambda more=0: Tensor(draw.integers(4, 100, (4, 8 + more)), ms.int32)  # noqa: E731
            size = getattr(config, "image_size", 32)
            known = {
                "input_ids": lambda: tokens(
                    "Bert" not in kind.__name__ and "T5" not in kind.__name__ and "GLMFor" not in kind.__name__
                ),
                "image": lambda: Tensor(draw.standard_normal((4, 3, size, size)).astype(np.float32)),
                "pixel_values": lambda: Tensor(draw.standard_normal((4, 3, size, size)).astype(np.float32)),
                "labels": lambda: tokens(),
                "attention_mask": lambda: Tensor(np.ones((4, 8)), ms.float32),
                "decoder_input_ids": lambda: tokens(),
            }
            known |= {"input_mask": known["attention_mask"], "token_type_id": lambda: tokens() * 0, "x": known["image"]}
            wanted = ["labels", "attention_mask"] * ("T5" in kind.__name__)
            needed = [name for name, each in names.items() if each.default is each.empty and name != "self"]
            given = {name: known[name]() for name in dict.fromkeys([*needed, *wanted, "input_ids"]) if name in names}
            return kind(config), (), given

        return make

    return {name: maker(getattr(library, name)) for name in names.split()}


def _none(*_, **__):
    """What takes the place of an initialisation."""


LIBRARIES = {"mindone": mindone, "mindcv": mindcv, "mindformers": mindformers}
