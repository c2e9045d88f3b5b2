"""Verbs about a config's data: preprocess, capture"""

from jaxtrain.cli.options import config_parser, read_config
from jaxtrain.cli.together import run_together


def run_preprocess(argv: list[str]) -> None:
    """Tokenize everything, report what was dropped and why, show samples."""
    parser = config_parser("preprocess")
    parser.add_argument("--samples", type=int, default=3, help="samples to show (default 3)")
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.cli.preprocess import preprocess

    preprocess(read_config(args), args.samples)


def run_capture(argv: list[str]) -> int:
    """Write the target's states of all samples of a config's data to task.target.path."""
    args = config_parser("capture").parse_intermixed_args(argv)

    def work(config) -> int:
        from jaxtrain.cli.capture import capture

        capture(config)
        return 0

    return run_together(lambda: read_config(args), lambda config: (config.parallel, None), work)
