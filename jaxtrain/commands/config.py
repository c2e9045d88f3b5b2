"""Verbs about configs: convert, docs, schema"""

import json
from pathlib import Path

from jaxtrain.arguments import Parser


def run_convert(argv: list[str]) -> int:
    """Put a config of another system into our keys."""
    from jaxtrain.convert import SYSTEMS
    from jaxtrain.verbs.convert import convert

    parser = Parser(prog="jaxtrain convert", description=run_convert.__doc__)
    parser.add_argument(
        "file",
        type=Path,
        help="Axolotl's YAML, prime-rl's TOML, TRL's YAML or a file with its command line (.sh)",
    )
    parser.add_argument("--from", dest="system", choices=SYSTEMS, help="whose; told by the keys")
    parser.add_argument("--output", type=Path, help="TOML file to write; without: the terminal")
    args = parser.parse_args(argv)
    return convert(args.file, args.system, args.output)


def run_docs(argv: list[str]) -> None:
    """Print docs/config.md."""
    from jaxtrain.config.docs import render_markdown

    print(render_markdown(), end="")


def run_schema(argv: list[str]) -> None:
    """Print the config's JSON schema, for editors."""
    from jaxtrain.config import Config

    print(json.dumps(Config.model_json_schema(), indent=2))
