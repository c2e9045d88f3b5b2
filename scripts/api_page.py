"""docs/reference/api.md, written from the signatures and docstrings of the public names."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """# API reference

The names that programs, rewards and environments call, with the docstrings of the code. How to use
them: [from a program](../api.md), [environments](../environments.md),
[your own reward](../rl.md#my-reward). This page is generated: `make docs`.
"""
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "jaxtrain.api": {
        "Model": ("__init__", "logprobs", "logits", "scores", "generate", "encode", "refresh"),
        "logprobs": (),
        "logits": (),
    },
    "jaxtrain.generation.engine": {"Completion": ()},
    "jaxtrain.data.packing.branches": {"list_branches": (), "TreeBranch": ()},
    "jaxtrain.environments.conversation": {
        "Conversation": (
            "say", "draw", "call", "answer", "use", "another", "other", "full", "reward", "finish"
        ),
    },
    "jaxtrain.environments.rewards.texts": {"text_of": ()},
}  # fmt: skip
"""{module: {name: methods of a class}}."""


def render_api() -> str:
    """The page."""
    parts = [HEAD]
    for module, names in NAMES.items():
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        parts.append(f"## {module}\n")
        nodes = {node.name: node for node in tree.body if hasattr(node, "name")}
        for name, methods in names.items():
            node = nodes[name]
            if isinstance(node, ast.ClassDef):
                parts += [f"### {name}\n", read_docstring(node)]
                fields = [*render_fields(node)]
                parts += [*fields, ""] if fields else []
                members = {child.name: child for child in node.body if hasattr(child, "name")}
                parts += [
                    text for method in methods for text in render_function(members[method], name)
                ]
            else:
                parts += render_function(node)
    return "\n".join(parts)


def render_function(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str = "") -> list[str]:
    """Return the heading, the signature and the docstring of a function."""
    title = owner if node.name == "__init__" else ".".join(filter(None, (owner, node.name)))
    if any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        return [f"#### {title}\n", read_docstring(node)]
    arguments = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    signature = f"```text\n{word}{title}({arguments}){result}\n```\n"
    return [f"{'####' if owner else '###'} {title}()\n", signature, read_docstring(node)]


def render_fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield a list item for each public field that has a docstring."""
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            described = " ".join(inspect.cleandoc(ast.literal_eval(text.value)).split())
            yield f"- `{ast.unparse(field.target)}`: {described}"


def read_docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the docstring as paragraphs."""
    return f"{ast.get_docstring(node)}\n"
