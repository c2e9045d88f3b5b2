"""The verb `preprocess`: what the data becomes, before anything is trained on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtrain.cli.processes import config_parser, read_config

if TYPE_CHECKING:
    from jaxtrain.config import Config


def run_preprocess(argv: list[str]) -> None:
    """Tokenize everything, report what was dropped and why, show samples."""
    parser = config_parser("preprocess")
    parser.add_argument("--samples", type=int, default=3, help="samples to show (default 3)")
    args = parser.parse_intermixed_args(argv)
    preprocess(read_config(args), args.samples)


def preprocess(config: Config, num_samples: int) -> None:
    """Tokenize every row, count what was dropped and why, show samples and how rows fill up."""
    from jaxtrain.core.architecture import find_tokenizer
    from jaxtrain.methods.registry import find_method
    from jaxtrain.runs.console import SafeConsole

    data = find_method(config).open_data(config, find_tokenizer(config.model))
    data.show(SafeConsole(), num_samples)
