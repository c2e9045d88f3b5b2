"""Verbs about the configs that come with jaxtrain: quickstart, init"""

import re
from pathlib import Path

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.errors import UserError


def run_quickstart(argv: list[str]) -> int:
    """Train the quickstart's model; what else is said is as of `jaxtrain --config`."""
    from jaxtrain.cli.train import run_train

    return run_train(["--config", "quickstart", *argv])


def run_init(argv: list[str]) -> None:
    """Copy a config that comes with jaxtrain, to change it; without a name: what there is."""
    parser = Parser("jaxtrain init", description=run_init.__doc__)
    parser.add_argument("name", nargs="?", help="such as sft_qwen3; without: a list of all")
    parser.add_argument("--output", type=expand_path, help="default: NAME.toml, here")
    args = parser.parse_args(argv)
    from jaxtrain.config.bundled import list_recipes

    recipes = list_recipes()
    if args.name is None:
        width = max(map(len, recipes), default=0)
        for name, path in recipes.items():
            print(f"{name:<{width}}  {read_purpose(path)}")
        return
    if args.name not in recipes:
        raise UserError(f"jaxtrain init: there is no {args.name!r}; there are {', '.join(recipes)}")
    output = args.output or Path(f"{Path(args.name).name}.toml")
    text = recipes[args.name].read_text(encoding="utf-8")
    # The line for editors names a file beside the original.
    text = re.sub(r"\A#:schema .*\n", "", text)
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{output} is there already; give another --output") from None
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}") from None
    print(f"{output}: train with jaxtrain --config {output}")


def read_purpose(path: Path) -> str:
    """Return the first comment of a config, up to the first full stop or colon."""
    comment = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment += "" if line.startswith("#:") else line.lstrip("# ") + " "
    return re.split(r"(?<!\.)[.:;](?:\s|$)", comment, maxsplit=1)[0].strip()
