"""The verb `preprocess`: what the data becomes, before anything is trained on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtrain.arguments import expand_path
from jaxtrain.cli.processes import config_parser, read_config
from jaxtrain.runs.console import SafeConsole
from jaxtrain.runs.run_files import require_writable, write_output

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
    parser.add_argument(
        "--show",
        type=expand_path,
        metavar="FILE.html",
        help="also write what is printed as a page, with thumbnails of the samples' images",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file of --show if it is there"
    )
    args = parser.parse_intermixed_args(argv)
    if args.rank is not None and args.rank < 1:
        parser.error(f"--rank {args.rank}: give the number of trees of each dataset, 1 or more")
    config = read_config(args)
    if args.show is None:
        preprocess(config, args.samples, args.rank, SafeConsole())
        return
    from jaxtrain.cli.preview_page import PageConsole

    require_writable(args.show, args.overwrite, "--show")
    page = PageConsole()
    preprocess(config, args.samples, args.rank, page)
    write_output(args.show, page.render_page(), "--show")
    print(args.show)


def preprocess(config: Config, num_samples: int, rank: int | None, console: SafeConsole) -> None:
    """Tokenize every row, count what was dropped and why, show samples and how rows fill up; or
    rank the datasets by their `rank` best trees."""
    from jaxtrain.core.architecture import find_tokenizer
    from jaxtrain.methods.registry import find_method

    data = find_method(config).open_data(config, find_tokenizer(config.model))
    if rank is None:
        data.show(console, num_samples)
        return
    from jaxtrain.methods.trees.ranking import show_ranking

    recipe: Any = getattr(data, "recipe", None)
    show_ranking(config.data.datasets, recipe, rank, console)
