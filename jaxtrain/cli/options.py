"""What the verbs with a config share of their command lines"""

import argparse
import os

from jaxtrain.arguments import Parser


def config_parser(verb: str, required: bool = True, first: str = "") -> Parser:
    """The options that every verb with a config shares."""
    parser = Parser(f"jaxtrain {verb}")
    parser.add_argument(
        "--config",
        type=os.path.expanduser,
        required=required,
        help="TOML or YAML file, or the name of a config that comes with jaxtrain",
    )
    parser.add_argument("overrides", nargs="*", help=f"{first}section.key=value")
    return parser


def read_config(args: argparse.Namespace):
    """The Config that --config and the overrides name."""
    from jaxtrain.config import load_config

    return load_config(args.config, args.overrides)
