"""The house's rules as tests: imports only point down, the core knows no method, the path of SFT is
short, a third of the package needs no jax, files are short. docs/architecture.md draws the same."""

import ast
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from toy_run import EVEN_TOKENS, MODEL

ROOT = Path(__file__).parents[1]

# A line may import the lines above it, its own line, and the members of a room among themselves. A
# part of a room may stand lower or higher than the room itself.
LAYERS = [
    ["jaxtrain_kernels", "moved"],
    ["errors", "text_safety", "safe_io", "batch", "arguments"],
    ["plugins", "environments.sandbox", "convert"],
    ["config", "light_transformers"],
    ["huggingface", "distributed"],
    ["layers"],
    ["models"],
    ["adapters"],
    ["core.losses"],
    ["data"],
    ["runs"],
    ["runs.dashboard"],
    ["runs.report", "runs.doctor", "runs.observers"],
    ["core"],
    ["generation.engine", "generation.episodes", "generation.publisher"]
    + ["generation.episode_engine", "generation.version_tracker"],
    ["environments"],
    ["generation"],
    ["methods"],
    ["api", "runs.estimate"],
    ["training_api"],
    ["cli", "runs.sweep"],
    ["main"],
]
RANK = {name: rank for rank, line in enumerate(LAYERS) for name in line}

FREE_OF_METHODS = {"methods", "generation", "environments", "cli"}
"""Rooms that `core` and `runs` never import, however late."""

SHARED = {
    "offline": "data that are files, of every method that trains on rows",
    "reference_model": "the reference that a policy is held to",
    "registry": "from task.kind to a method",
    "reopen": "trained runs, opened again",
    "rl.advantages": "how rewards become advantages",
    "rl.batch_builder": "episodes as batches, of every method that trains on what is drawn",
    "rl.config": "keys that all policies have",
    "rl.judges": "columns of tables of rewards",
    "rl.loss": "the terms of a policy's objective",
    "rl.method": "EBFT is RL with rewards of its own",
    "rl.prompt_data": "prompts and what answers them",
    "rl.round": "one round of answers",
    "reward_model.method": "what a reward model's head must look like, for RL that asks it",
}
"""Modules of methods that other methods may import."""

SFT = ("jaxtrain.core.loop", "jaxtrain.methods.sft.method", "jaxtrain.models.qwen3")
MAX_SFT_MODULES = 150
MAX_IMPORT_CHAIN = 25

WITHOUT_JAX = [
    *("arguments", "batch", "errors", "plugins", "safe_io", "text_safety"),
    *("config", "convert", "core.metrics", "data", "environments", "runs.doctor", "runs.sweep"),
    *("runs.hardware", "runs.manifest", "runs.observers", "runs.report", "runs.samples"),
    *("runs.sinks", "runs.watchdog", "runs.dashboard.app", "runs.dashboard.reader"),
    *("generation.engine", "generation.episodes", "generation.producer", "generation.ray"),
    *("generation.vllm.engine", "generation.vllm.launch", "generation.vllm.remote"),
    *("generation.weight_sync.publish_lora", "generation.weight_sync.publish_weights"),
]
"""Modules, or whole packages."""

MAX_LINES, MAX_KERNEL_LINES = 500, 900

MAX_PARAMETERS = 7
WIDE = {
    "adapters.merge.merge_adapter": "the options of `jaxtrain merge`, a public function",
    "core.losses.vocabulary.sum_logp": "arrays and the numbers of one formula",
    "data.comparisons.preferences.Preferences": "half of them are set by one method each",
    "environments.chat.ChatEnv": "what a section env and a plugin may each give",
    "environments.rewards.vllm_reward.vllm_reward": "its keywords are keys of a user's config",
    "layers.block.Block": "a slot for each norm and module that a published block has",
    "layers.expert_transport.send_through": "operands of a custom_vjp stand one by one",
    "layers.mamba2.mix_heads": "operands of a shard_map",
    "layers.router.Router": "each keyword is a published router's",
    "layers.sharded_attention.attend_cached": "operands of a shard_map",
    "layers.sharded_attention.local": "operands of a shard_map",
    "methods.distillation.loss.sum_divergence": "arrays and the numbers of one formula",
    "methods.distillation.loss.local": "operands of a shard_map",
    "methods.distillation.loss.walk": "operands of a custom_vjp stand one by one",
    "methods.trees.selection.select_rows": "keys of a section and of a dataset",
    "models.naming.expert_names": "each keyword is a tensor name of some family",
    "runs.checkpoint.Checkpoints": "keys of a section, and two sinks",
    "runs.dashboard.chart.chart": "one keyword for each key of the charts, and their size",
}
"""Functions, or classes, with more than MAX_PARAMETERS parameters, and why: at most 20."""


def room(module: str) -> str | None:
    """The member of LAYERS that a module belongs to; None for outside packages."""
    parts = module.split(".")
    if parts[0] == "jaxtrain_kernels":
        return "jaxtrain_kernels"
    if parts[0] != "jaxtrain" or len(parts) == 1:
        return None
    part = ".".join(parts[1:3])
    return part if part in RANK else parts[1]


def sources() -> list[Path]:
    return sorted([*ROOT.glob("jaxtrain/**/*.py"), *ROOT.glob("kernels/**/*.py")])


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT / "kernels" if "kernels" in path.parts else ROOT)
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in sources()}


class Facts(NamedTuple):
    """What the tests read of a file."""

    at_import: list[tuple[int, str]]
    """(line, module) of imports that run when the file is imported."""
    lazy: list[tuple[int, str]]
    """Those inside functions."""
    wide: list[str]
    """Functions with more than MAX_PARAMETERS parameters; a constructor has its class's name."""


@functools.cache
def facts(path: Path) -> Facts:
    """Read a file once: all files' trees are millions of objects."""
    result = Facts([], [], [])

    def visit(node: ast.AST, inside: bool, owner: str | None) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            (result.lazy if inside else result.at_import).extend(imported(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if sum(arg.arg not in ("self", "cls") for arg in args) > MAX_PARAMETERS:
                result.wide.append(owner or node.name)
            inside = True
        owner = node.name if isinstance(node, ast.ClassDef) else None
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # which hold neither imports nor functions
                visit(child, inside, owner)

    visit(ast.parse(path.read_text()), False, None)
    return result


def imported(node: ast.Import | ast.ImportFrom):
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield node.lineno, alias.name
        else:
            # `from package import module` names a module of the package.
            inner = f"{node.module}.{alias.name}"
            yield node.lineno, inner if inner in modules() else node.module or ""


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions, too."""
    return facts(path).at_import + facts(path).lazy


@functools.cache
def graph(*, packages: bool = True) -> dict[str, set[str]]:
    """{module: modules of ours that are imported with it}."""
    nodes = {
        name: path for name, path in modules().items() if packages or path.name != "__init__.py"
    }
    return {
        name: {m for _, m in facts(path).at_import if m in nodes and m != name}
        for name, path in nodes.items()
    }


def test_imports_point_down():
    problems = []
    for name, path in modules().items():
        importer = room(name)
        if importer is None:  # jaxtrain/__init__.py
            allowed = {"jaxtrain.moved"}
            assert not {m for _, m in imports(path) if m.startswith("jaxtrain")} - allowed
            continue
        if name == "jaxtrain.methods":  # declarations, without any import of a method
            continue
        assert importer in RANK, f"{path} is in no room; add it to LAYERS and the architecture"
        for line, module in imports(path):
            target = room(module)
            if module == "jaxtrain.methods" or target in (None, importer):
                continue
            if RANK.get(target, 99) > RANK[importer]:
                problems.append(f"{path}:{line} imports upwards: {module}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", ["core", "runs"])
def test_the_core_and_runs_know_no_method(name):
    """Modules above the core are not named, either: sweeps and estimates are about runs alone."""
    problems = [
        f"{path}:{line} imports {module}"
        for path in (ROOT / "jaxtrain" / name).rglob("*.py")
        for line, module in imports(path)
        if module.startswith("jaxtrain.") and module.split(".")[1] in FREE_OF_METHODS
    ]
    assert not problems, "\n".join(problems)


def test_a_method_imports_no_other_method():
    problems = []
    for folder in (path for path in (ROOT / "jaxtrain/methods").iterdir() if path.is_dir()):
        for path in folder.glob("*.py"):
            for line, module in imports(path):
                name = module.removeprefix("jaxtrain.methods.")
                foreign = name != module and name.split(".")[0] != folder.name
                if foreign and name not in SHARED:
                    problems.append(f"{path}:{line} imports another method: {name}")
    assert not problems, "\n".join(problems)
    unused = {name for name in SHARED if f"jaxtrain.methods.{name}" not in modules()}
    assert not unused, f"no such modules: {unused}"


def test_no_two_modules_need_each_other():
    """Inside a room, too, one can be read after the other."""
    nodes = {name for name, path in modules().items() if path.name != "__init__.py"}
    cyclic = {
        name: {m for _, m in imports(modules()[name]) if m in nodes and m != name} for name in nodes
    }
    while free := [name for name, needs in cyclic.items() if not needs & set(cyclic)]:
        for name in free:
            del cyclic[name]
    assert not cyclic, f"these need each other: {sorted(cyclic)}"


def test_the_path_of_sft_is_short():
    """Modules that come along with SFT of one family, as they are imported before any function."""
    needs, reached, todo = graph(), set(), list(SFT)
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [m for m in needs[name] if m.startswith("jaxtrain.")]
    reached = {name for name in reached if name.split(".")[0] == "jaxtrain"}
    assert len(reached) <= MAX_SFT_MODULES, f"{len(reached)} modules:\n" + "\n".join(
        sorted(reached)
    )


def test_the_longest_chain_of_imports():
    needs = graph(packages=False)

    @functools.cache
    def chain(name: str) -> tuple[str, ...]:
        below = [chain(m) for m in needs[name] if m.startswith("jaxtrain.")]
        return (name, *max(below, key=len, default=()))

    longest = max((chain(name) for name in needs if name.startswith("jaxtrain.")), key=len)
    assert len(longest) <= MAX_IMPORT_CHAIN, f"{len(longest)}: {' -> '.join(longest)}"


@pytest.mark.slow
def test_a_method_is_removed_by_removing_its_folder(tmp_path):
    """SFT, preferences and RL train without methods/ebft and everything that it has declared."""
    shutil.copytree(ROOT / "jaxtrain", tmp_path / "jaxtrain")
    shutil.rmtree(tmp_path / "jaxtrain/methods/ebft")
    model = MODEL.replace("max_position_embeddings = 64", "max_position_embeddings = 512")
    for kind, sections in small_tasks(tmp_path).items():
        file = tmp_path / f"{kind}.toml"
        file.write_text(SMALL_RUN.format(model=model, output=tmp_path / kind) + sections)
        code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / "kernels")!r}]
import jaxtrain
assert jaxtrain.__file__.startswith({str(tmp_path)!r})
from jaxtrain.main import main
sys.exit(main(["--config", {str(file)!r}]))
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, f"{kind}: {done.stderr[-3000:]}"


SMALL_RUN = """
[run]
max_steps = 2
export = false
output_dir = "{output}"
{model}
[data]
sequence_len = 512
micro_batch_size = 2
[log]
plot = false
report = false
"""


def small_tasks(folder: Path) -> dict[str, str]:
    """Sections of a config by task.kind."""
    pairs = [
        {"prompt": f"{a} + 1 =", "chosen": f" {a + 1}", "rejected": f" {a + 2} or so"}
        for a in range(36)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    calculator = '[[data.datasets]]\npath = "builtin:calculator"\noptions = { num_rows = 200 }\n'
    rollout = "[rollout]\nprompts_per_step = 2\ngroup_size = 2\n"
    return {
        "sft": calculator,
        "preference": f'[[data.datasets]]\npath = "{path}"\n[task]\nkind = "preference"\n',
        "rl": f'{calculator}[task]\nkind = "rl"\n{rollout}{EVEN_TOKENS}',
    }


def test_files_are_short():
    long = {}
    for path in sources():
        lines = len(path.read_text().splitlines())
        if lines > (MAX_KERNEL_LINES if "kernels" in path.parts else MAX_LINES):
            long[str(path)] = lines
    assert not long


def test_functions_take_few_parameters():
    """Parameters that belong together are a small dataclass."""
    wide = [
        f"{name.removeprefix('jaxtrain.')}.{function}"
        for name, path in modules().items()
        if name.startswith("jaxtrain.")
        for function in facts(path).wide
    ]
    assert set(wide) == set(WIDE), f"new or no longer wide: {set(wide) ^ set(WIDE)}"
    assert len(wide) <= 20, wide


def test_no_drawer_for_everything():
    names = {"utils", "helpers", "misc", "common", "manager"}
    assert not [path for path in sources() if path.stem in names]


def test_a_third_of_the_house_runs_without_jax():
    """Grain workers and environments must start fast and must not touch an accelerator."""
    prefixes = tuple(f"jaxtrain.{name}" for name in WITHOUT_JAX)
    names = [name for name in modules() if f"{name}.".startswith(tuple(f"{p}." for p in prefixes))]
    code = "import sys; sys.modules['jax'] = None\n" + "\n".join(f"import {m}" for m in names)
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
