"""The verb `preprocess`: what the data becomes, before anything is trained on it."""

from jaxtrain.config import Config
from jaxtrain.core.assemble import find_tokenizer
from jaxtrain.run.console import SafeConsole
from jaxtrain.tasks import find_method


def preprocess(config: Config, num_samples: int) -> None:
    """Tokenise every row, count what was dropped and why, show samples and how rows fill up."""
    data = find_method(config).open_data(config, find_tokenizer(config.model))
    data.show(SafeConsole(), num_samples)
