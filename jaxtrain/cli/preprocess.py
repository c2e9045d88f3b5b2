"""The verb `preprocess`: what the data becomes, before anything is trained on it."""

from jaxtrain.config import Config
from jaxtrain.core.bundle import find_tokenizer
from jaxtrain.methods.registry import find_method
from jaxtrain.runs.console import SafeConsole


def preprocess(config: Config, num_samples: int) -> None:
    """Tokenize every row, count what was dropped and why, show samples and how rows fill up."""
    data = find_method(config).open_data(config, find_tokenizer(config.model))
    data.show(SafeConsole(), num_samples)
