"""Verbs about configs: convert, docs, schema"""

from pathlib import Path

from jaxtrain.arguments import Parser, expand_path


def run_convert(argv: list[str]) -> int:
    """Put a config of another system into our keys."""
    from jaxtrain.cli.convert import convert
    from jaxtrain.convert import SYSTEMS

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
    """Print every key of the config, with type, default and meaning, as Markdown."""
    Parser("jaxtrain docs", description=run_docs.__doc__).parse_args(argv)
    from jaxtrain.config.docs import render_markdown

    print(render_markdown(), end="")


def run_schema(argv: list[str]) -> None:
    """Print the config's JSON schema, for editors, or write it to a file that the first line of a
    config names: `#:schema schema.json` in TOML, `# yaml-language-server: $schema=schema.json`."""
    parser = Parser("jaxtrain schema", description=run_schema.__doc__)
    parser.add_argument("--output", type=expand_path, help="JSON file; without: the terminal")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    args = parser.parse_args(argv)
    from jaxtrain.config.schema import render_schema
    from jaxtrain.runs.run_files import require_writable, write_output

    if args.output is None:
        print(render_schema(), end="")
        return
    require_writable(args.output, args.overwrite)
    write_output(args.output, render_schema().encode())
    print(args.output)
