"""Arguments of operators that arrive as words, or as the numbers that MindSpore gives these. Pure Python."""

WORDS = {  # parameter -> its words by number
    "approximate": {0: "none", 1: "tanh"},
    "data_format": {0: "NCHW", 1: "NHWC", 14: "NCDHW"},
    "dtype": {43: "float32", 44: "float64"},  # those that hold what a float holds
    "indexing": {0: "ij", 1: "xy"},
    "input_layout": {0: "BSH", 1: "BNSD", 2: "SBH", 3: "BSND", 4: "TND", 5: "TH"},
    "interpolation_mode": {0: "bilinear", 1: "nearest"},
    "mode of Qr": {0: "reduced", 1: "complete", 2: "r"},
    "norm": {0: "backward", 1: "forward", 2: "ortho"},
    "pad_mode": {0: "pad", 1: "same", 2: "valid"},
    "padding_mode": {0: "zeros", 1: "border", 2: "reflection"},
    "reduce": {0: "none", 1: "add"},
    "reduction": {0: "sum", 1: "mean", 2: "none"},
    "rounding_mode": {1: "trunc", 2: "floor"},
}


def word(parameter, value):
    """The word of a parameter that a number stands for; any other value as it is."""
    return WORDS[parameter].get(value, value) if isinstance(value, int) else value
