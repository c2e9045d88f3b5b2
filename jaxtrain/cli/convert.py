"""`jaxtrain convert`: a config of Axolotl, TRL or prime-rl as one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.arguments import Parser
from jaxtrain.errors import UserError
from jaxtrain.safe_io import read_text
from jaxtrain.text_safety import escape_control_chars, show

if TYPE_CHECKING:
    from jaxtrain.convert import Conversion


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


COMMANDS = (".sh", ".txt", "")


def convert(path: Path, system: str | None, output: Path | None) -> int:
    """Write the config that `path` is here, to `output` or the terminal.

    system: one of SYSTEMS, or None to tell by the keys. Returns 1 where the result still needs a
    hand, which is said; UserError where nothing can be made of the file.
    """
    from jaxtrain.convert import SYSTEMS
    from jaxtrain.runs.manifest import write_atomically

    source = read(path)
    system = system or detect_system(source, path)
    conversion = SYSTEMS[system].convert(source)
    problem = check(conversion)
    head = f"{path.name} of {system}, put into jaxtrain's keys by `jaxtrain convert`."
    if problem:
        head += f"\nNot ready yet:\n{problem}"
    text = conversion.write(head)
    if output is None:
        print(text, end="")
        return 1 if problem else 0
    if output.exists():
        raise UserError(f"{output} exists; name another file")
    try:
        write_atomically(output, text)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None
    print(f"{output}: {count(conversion.table)} keys from {system}")
    for key, value, why in conversion.missed:
        print(escape_control_chars(f"  no counterpart: {key} = {show(value)[:80]}: {why}"))
    for key, note in conversion.notes:
        print(escape_control_chars(f"  {key}: {note}"))
    print(problem or f"next: jaxtrain --config {output} --dry-run")
    return 1 if problem else 0


def read(path: Path) -> dict[str, Any]:
    """A table, of a command line as well."""
    from jaxtrain.config.parse import MOST_BYTES, read_table
    from jaxtrain.convert import read_numbers, trl

    if path.suffix.lower() not in COMMANDS:
        return read_numbers(read_table(path))
    try:
        return trl.parse_command(read_text(path, MOST_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read as a command line: {reason}") from None


def detect_system(source: dict[str, Any], path: Path) -> str:
    """Return the system that the keys belong to."""
    from jaxtrain.convert import SYSTEMS

    for name, system in SYSTEMS.items():
        if system.detect(source):
            return name
    raise UserError(
        f"{path}: this looks like no config of {', '.join(SYSTEMS)}; if it is one, say which with"
        " --from"
    )


def check(conversion: Conversion) -> str | None:
    """Return what the result still lacks, for people; None if it is complete."""
    from jaxtrain.config.load import validate_config

    try:
        validate_config(conversion.table, "it")
    except UserError as error:
        return str(error)
    return None


def count(table: dict[str, Any]) -> int:
    """Values of a nested table."""
    return sum(count(v) if isinstance(v, dict) else 1 for v in table.values())
