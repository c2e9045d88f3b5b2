"""The house's rules as tests: imports only point down, jax stays out of a third of it, files are
short. docs/architecture.md draws the same picture."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Each line may import lines above it, and its own members. A module of a room may stand lower than
# the room itself; inside a room no two modules may need each other.
LAYERS = [
    ["jaxtrain_kernels"],
    ["errors", "shown", "foreign", "batch", "arguments", "moved"],
    ["plugins", "sandbox", "convert"],
    ["config"],
    ["hf", "parallel"],
    ["layers"],
    ["models"],
    ["adapters"],
    ["losses"],
    ["data"],
    ["run"],
    ["watch", "report", "doctor", "observers"],
    ["core"],
    ["rollout.types"],
    ["envs", "rewards"],
    ["rollout"],
    ["tasks"],
    ["train"],
    ["api", "scale"],
    ["verbs", "sweep"],
    ["commands"],
    ["main"],
]
RANK = {name: rank for rank, line in enumerate(LAYERS) for name in line}

WITHOUT_JAX = [
    "config",
    "convert",
    "arguments",
    "errors",
    "shown",
    "foreign",
    "batch",
    "plugins",
    "core.metrics",
    "run.manifest",
    "run.hardware",
    "run.samples",
    "run.sinks",
    "watch.open",
    "doctor.open",
    "report.open",
    "watch.app",
    "observers.open",
    "observers.hub",
    "sweep",
    "data",
    "envs",
    "rewards",
    "sandbox",
    "rollout.types",
    "rollout.cluster.actors",
    "rollout.cluster.open",
    "rollout.mismatch",
    "rollout.vllm.engine",
    "rollout.vllm.gpus",
    "rollout.vllm.launch",
    "rollout.vllm.far",
    "rollout.vllm.publish_lora",
    "rollout.vllm.publish_weights",
]

MAX_LINES, MAX_KERNEL_LINES = 500, 900


def room(module: str) -> str | None:
    """The member of LAYERS that a module belongs to; None for outside packages."""
    parts = module.split(".")
    if parts[0] == "jaxtrain_kernels":
        return "jaxtrain_kernels"
    if parts[0] != "jaxtrain" or len(parts) == 1:
        return None
    own = ".".join(parts[1:3])
    return own if own in RANK else parts[1]


def sources() -> list[Path]:
    return sorted([*ROOT.glob("jaxtrain/**/*.py"), *ROOT.glob("kernels/**/*.py")])


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT / "kernels" if "kernels" in path.parts else ROOT)
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path):
    """(line, module) of every import in a file, those inside functions too."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
            if node.module == "jaxtrain":
                yield from ((node.lineno, f"jaxtrain.{alias.name}") for alias in node.names)


def test_imports_point_down():
    problems = []
    for path in sources():
        here = room(module_of(path))
        if here is None:  # jaxtrain/__init__.py
            assert {name for _, name in imports(path) if "." in name} <= {"jaxtrain.moved"}
            continue
        assert here in RANK, f"{path} belongs to no room; add it to LAYERS and to the architecture"
        for line, module in imports(path):
            there = room(module)
            if there is not None and there != here and RANK.get(there, 99) > RANK[here]:
                problems.append(f"{path}:{line} imports upwards: {module}")
    assert not problems, "\n".join(problems)


def test_no_two_modules_need_each_other():
    """Inside a room, too, one can be read after the other."""
    paths = {module_of(path): path for path in sources()}
    packages = {name for name, path in paths.items() if path.name == "__init__.py"}
    needs = {
        name: {m for _, m in imports(path) if m in paths and m != name and m not in packages}
        for name, path in paths.items()
    }
    # `from package import module` names the module as well as the package.
    for name, path in paths.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module in packages:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                needs[name] |= (inner & set(paths)) - {name}
    left = dict(needs)
    while free := [name for name, wanted in left.items() if not wanted & set(left)]:
        for name in free:
            del left[name]
    assert not left, f"these need each other: {sorted(left)}"


def test_files_are_short():
    long = {}
    for path in sources():
        lines = len(path.read_text().splitlines())
        if lines > (MAX_KERNEL_LINES if "kernels" in path.parts else MAX_LINES):
            long[str(path)] = lines
    assert not long


def test_no_drawer_for_everything():
    names = {"utils", "helpers", "misc", "common", "manager"}
    assert not [path for path in sources() if path.stem in names]


def test_a_third_of_the_house_runs_without_jax():
    """Grain workers and environments must start fast and must not touch an accelerator."""
    modules = [f"jaxtrain.{name}" for name in WITHOUT_JAX]
    for package in ("config", "data", "envs"):
        modules += [module_of(path) for path in (ROOT / "jaxtrain" / package).glob("*.py")]
    code = "import sys; sys.modules['jax'] = None\n" + "\n".join(f"import {m}" for m in modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_command_line_imports_nothing_heavy():
    heavy = "{'jax', 'transformers', 'pydantic'}"
    code = f"import sys, jaxtrain.main\nassert not {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_tree_is_up_to_date():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from make_tree import PLACE, write_page
    finally:
        sys.path.pop(0)
    assert PLACE.read_text() == write_page(), "run python scripts/make_tree.py"
