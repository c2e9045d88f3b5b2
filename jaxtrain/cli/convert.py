"""`jaxtrain convert`: a config of Axolotl, LLaMA-Factory, TRL or prime-rl as one of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.arguments import Parser
from jaxtrain.errors import UserError
from jaxtrain.safe_io import read_text
from jaxtrain.text_safety import escape_control_chars

if TYPE_CHECKING:
    from jaxtrain.convert import Conversion


def run_convert(argv: list[str]) -> int:
    """Put a config of another system into our keys."""
    from jaxtrain.convert import SYSTEMS

    parser = Parser(prog="jaxtrain convert", description=run_convert.__doc__)
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="Axolotl's or LLaMA-Factory's YAML, prime-rl's TOML, TRL's YAML or a file with its"
        " command line (.sh); of several, later ones replace keys of earlier ones",
    )
    parser.add_argument("--from", dest="system", choices=SYSTEMS, help="whose; told by the keys")
    parser.add_argument("--output", type=Path, help="TOML file to write; without: the terminal")
    args = parser.parse_args(argv)
    return convert(args.files, args.system, args.output)


COMMANDS = (".sh", ".txt", "")


def convert(paths: Sequence[Path], system: str | None, output: Path | None) -> int:
    """Write the config that the files are here, to `output` or the terminal.

    system: one of SYSTEMS, or None to tell by the keys. Returns 1 where the result still needs a
    hand, which is said; UserError where nothing can be made of the files.
    """
    from jaxtrain.convert import SYSTEMS, describe
    from jaxtrain.runs.manifest import write_atomically

    source: dict[str, Any] = {}
    for path in paths:
        source = merge(source, read(path))
    system = system or detect_system(source, paths[0])
    conversion = hide_secrets(SYSTEMS[system].convert(source))
    problem = check(conversion)
    name = " and ".join(path.name for path in paths)
    head = f"{name} of {system}, put into jaxtrain's keys by `jaxtrain convert`."
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
    for missed in conversion.missed:
        print(f"  no counterpart: {describe(missed)}")
    for key, note in conversion.notes:
        print(escape_control_chars(f"  {key}: {note}"))
    if conversion.dropped:
        print(
            f"  not needed: {sum(map(len, conversion.dropped.values()))} keys, listed in the file"
        )
    print(problem or f"next: jaxtrain --config {output} --dry-run")
    return 1 if problem else 0


def read(path: Path) -> dict[str, Any]:
    """Return a file's table, of a command line as well, with what stands in files that it names:
    those it inherits from (toml_files), dataset_info.json, and configs of TRL and accelerate."""
    from jaxtrain.config.parse import MAX_BYTES, read_table
    from jaxtrain.convert import read_numbers, trl

    if path.suffix.lower() in COMMANDS:
        try:
            table = trl.parse_command(read_text(path, MAX_BYTES))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be read as a command line: {reason}") from None
        launcher = table.get("launcher", {})
        if file := find_beside(path, launcher.get("config_file")):
            table["launcher"] = {**read_table(file), **launcher}
        elif "config_file" in launcher:
            table["config_file"] = launcher["config_file"]
        if file := find_beside(path, table.get("config")):
            del table["config"]
            table = {**read_numbers(read_table(file)), **table}
        return table
    table = read_numbers(read_table(path))
    parents = table.pop("toml_files", None) or []
    if "stage" in table or "finetuning_type" in table:
        info = Path(str(table.get("dataset_dir") or "data")) / "dataset_info.json"
        if file := find_beside(path, info):
            table["dataset_info"] = read_table(file)
    for parent in reversed(parents if isinstance(parents, list) else [parents]):
        file = find_beside(path, parent)
        if file is None or file.resolve() == path.resolve():
            raise UserError(f"{path}: toml_files names {parent}, which is no other file")
        table = merge(read_numbers(read_table(file)), table)
    return table


def find_beside(path: Path, name: Any) -> Path | None:
    """Return the file of a name beside `path`, in the folders above it (a repository's own), or
    in the working directory; None without one."""
    folders = [*path.absolute().parents[:5], Path()]
    candidates = [folder / str(name) for folder in folders] if name else []
    return next((file for file in candidates if file.is_file()), None)


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables put together, the second's values in place of the first's."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge(old, value)
        merged[key] = value
    return merged


def hide_secrets(conversion: Conversion) -> Conversion:
    """Replace keys, passwords and the like in what the conversion writes and prints."""
    from jaxtrain.config.secrets import hides, redact, redact_text

    conversion.table = redact(conversion.table)
    conversion.missed = [
        (redact_text(key), redact(value, hides(key.split("."))), why)
        for key, value, why in conversion.missed
    ]
    conversion.notes = [(key, redact_text(note)) for key, note in conversion.notes]
    return conversion


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

    problems = []
    try:
        validate_config(conversion.table, "it")
    except UserError as error:
        problems.append(str(error))
    if conversion.images and (families := find_missing_families(conversion.get("model.path"))):
        problems.append(
            f"{conversion.images}: the model reads no images here, by its model_type or name;"
            f" {families} do (docs/vision.md)"
        )
    return "\n".join(problems) or None


def find_missing_families(path: Any) -> str | None:
    """Return the names of the families whose images are read, unless the model is of one or none is
    named: by the model_type of its folder, or by the name of one that is not here."""
    from jaxtrain.data.images.format import FAMILIES
    from jaxtrain.huggingface.files import read_object

    if path is None:
        return None
    file = Path(str(path)) / "config.json"
    if os.path.isfile(file):  # False, too, for names that no file can have
        reads = str(read_object(file).get("model_type")) in FAMILIES
    else:
        name = "".join(filter(str.isalnum, str(path).lower()))
        reads = any(family.replace("_", "") in name for family in FAMILIES)
    return None if reads else ", ".join(FAMILIES)


def count(table: dict[str, Any]) -> int:
    """Values of a nested table."""
    return sum(count(v) if isinstance(v, dict) else 1 for v in table.values())
