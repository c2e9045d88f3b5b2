"""The package that docs/extending.md describes, made from its text and put on sys.path."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/extending.md"
BLOCK = re.compile(r"```\w+\n# ([\w./]+)[^\n]*\n(.*?)```", re.DOTALL)


def install(folder: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """Write the entry points of a package as pip would."""
    info = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def my_package(tmp_path_factory):
    """The folder that holds my_package, importable and with its entry points."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in BLOCK.findall(PAGE.read_text()):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    install(folder, project["name"], project["entry-points"])
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]
