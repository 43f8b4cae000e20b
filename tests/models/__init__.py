"""Small models, written without any thought of parallelism, each with inputs and layouts declared from outside."""

from models import language, plain, vision
from models.example import Axes, Example, axes_of
from models.language import TINY_LLAMA, llama
from models.vision import Classifier

__all__ = ["Axes", "Classifier", "EXAMPLES", "Example", "TINY_LLAMA", "axes_of", "llama"]

EXAMPLES = {**plain.EXAMPLES, **vision.EXAMPLES, **language.EXAMPLES}
