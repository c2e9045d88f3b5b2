"""The verb `preprocess`: what the data becomes, before anything is trained on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtrain.cli.processes import config_parser, read_config

if TYPE_CHECKING:
    from jaxtrain.config import Config


def run_preprocess(argv: list[str]) -> None:
    """Tokenize everything, report what was dropped and why, show samples."""
    parser = config_parser("preprocess")
    parser.add_argument("--samples", type=int, default=3, help="samples to show (default 3)")
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="compare the datasets by what trees save, in the N best trees of each",
    )
    args = parser.parse_intermixed_args(argv)
    if args.rank is not None and args.rank < 1:
        parser.error(f"--rank {args.rank}: give the number of trees of each dataset, 1 or more")
    preprocess(read_config(args), args.samples, args.rank)


def preprocess(config: Config, num_samples: int, rank: int | None = None) -> None:
    """Tokenize every row, count what was dropped and why, show samples and how rows fill up; or
    rank the datasets by their `rank` best trees."""
    from jaxtrain.core.architecture import find_tokenizer
    from jaxtrain.methods.registry import find_method
    from jaxtrain.runs.console import SafeConsole

    data = find_method(config).open_data(config, find_tokenizer(config.model))
    if rank is None:
        data.show(SafeConsole(), num_samples)
        return
    from jaxtrain.methods.trees.ranking import show_ranking

    recipe: Any = getattr(data, "recipe", None)
    show_ranking(config.data.datasets, recipe, rank, SafeConsole())
