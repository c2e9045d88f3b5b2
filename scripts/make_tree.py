"""Write docs/reference/tree.md, a phrase per file, from the first lines of the modules' docstrings.

python scripts/make_tree.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "docs/reference/tree.md"
HEAD = (
    "# The tree\n\nA phrase for each file. This page is generated: `python scripts/make_tree.py`.\n"
)
WIDTH = 46


def render() -> str:
    """The tree as text: folders with what their __init__ says, files below them."""
    lines = []
    for top in ("jaxtrain", "kernels/jaxtrain_kernels", "jaxtrain_vllm"):
        lines += [*describe_folder(ROOT / top, ""), ""]
    for name in ("scripts", "benchmarks"):
        lines.append(f"{name}/")
        for path in sorted((ROOT / name).rglob("*.py")):
            lines.append(entry(f"  {path.relative_to(ROOT / name)}", first_line(path)))
    lines += ["", entry("configs/", "runnable recipes, one file each")]
    lines.append(entry("tests/", "mirrors the packages"))
    lines.append(entry("docs/", "architecture, config, methods"))
    return "\n".join(lines) + "\n"


def describe_folder(folder: Path, indent: str) -> list[str]:
    """A package: its own line, its files, then its subpackages."""
    init = folder / "__init__.py"
    title = str(folder.relative_to(ROOT)) if not indent else folder.name
    lines = [entry(f"{indent}{title}/", first_line(init) if init.exists() else "")]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            lines.append(entry(f"{indent}  {path.name}", first_line(path)))
    for child in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        lines += describe_folder(child, indent + "  ")
    return lines


def first_line(path: Path) -> str:
    """The first sentence of a module's docstring, on one line, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence = re.split(r"(?<!et al)\. ", " ".join(text.split("\n\n")[0].split()))[0]
    return sentence.rstrip(".")


def entry(name: str, phrase: str) -> str:
    return f"{name:<{WIDTH}} {phrase}".rstrip()


def write_page() -> str:
    """The whole page."""
    return f"{HEAD}\n```\n{render()}```\n"


if __name__ == "__main__":
    PLACE.write_text(write_page())
