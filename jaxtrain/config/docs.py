"""Documentation of every key, rendered from the sections themselves."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from jaxtrain.config.base import KnownIn, members, section_type
from jaxtrain.config.load import kind_of
from jaxtrain.config.root import Config
from jaxtrain.config.task import TaskSection


def render_pages() -> dict[str, str]:
    """Return the pages of docs/reference: config.md, which lists the sections, and a page for each
    section, with key, type, default and meaning."""
    titles: dict[str, list[tuple[str, type[BaseModel]]]] = {}
    for title, section in list_sections():
        titles.setdefault(page_name(title) or next(reversed(titles)), []).append((title, section))
    index = [
        "# Config reference",
        "",
        "Every key of a config with its type and default, a page for each section."
        " These pages are generated: `make docs`.",
        "",
        "| section | what it sets |",
        "|---|---|",
    ]
    pages = {}
    for name, sections in titles.items():
        for title, section in sections:
            about = " ".join((section.__doc__ or "").split())
            shown = title.strip("[]").replace("task (kind", "task (`kind").replace('")', '"`)')
            index.append(f"| [{shown}](config/{name}.md) | {about} |")
        pages[f"config/{name}.md"] = render_page(sections)
    index += ["", "```{toctree}", ":hidden:", "", *(f"config/{name}" for name in titles), "```"]
    return {"config.md": "\n".join(index) + "\n", **pages}


def page_name(title: str) -> str | None:
    """Return the name of a section's page; None for a section within the one before it."""
    kind = re.fullmatch(r'task \(kind = "(\w+)"\)', title)
    if kind:
        return f"task_{kind[1]}"
    return None if title.startswith("[") else title.partition(".")[0]


def render_page(sections: Sequence[tuple[str, type[BaseModel]]]) -> str:
    """Render one section and the sections within it, a table for each."""
    lines: list[str] = []
    for title, section in sections:
        about = " ".join((section.__doc__ or "").split())
        lines += [f"{'##' if lines else '#'} {title}", "", about, ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, kind, default, meaning in list_keys(section):
            kind = kind.replace("|", "\\|")
            lines.append(f"| `{key}` | {kind} | `{default}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def render_help() -> str:
    """Render the documentation of every key for a terminal."""
    lines = []
    for title, section in list_sections():
        lines += ["", f"[{title}]  {section.__doc__ or ''}"]
        for key, kind, default, meaning in list_keys(section):
            lines.append(f"  {key} = {default}   ({kind})")
            lines.append(f"      {meaning}")
    return "\n".join(lines)


def list_sections() -> list[tuple[str, type[BaseModel]]]:
    """(title, section) for the root's sections and the tables nested in them."""
    titled = []
    for name, field in Config.model_fields.items():
        sections = [member for member in members(field.annotation) if member is not TaskSection]
        for section in sections:
            kind = kind_of(section) if len(sections) > 1 else None
            title = f"{name}.NAME" if get_origin(field.annotation) is dict else name
            titled.append((f'{name} (kind = "{kind}")' if kind else title, section))
            for key, inner in section.model_fields.items():
                nested = section_type(inner.annotation)
                if nested and not any(section is nested for _, section in titled):
                    titled.append((f"[{name}.{key}]", nested))
    return titled


def list_keys(section: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """(key, type, default, meaning) for each field."""
    rows = []
    for key, field in section.model_fields.items():
        default = "required" if field.is_required() else describe_default(field.default)
        meaning = " ".join((field.description or "").split())
        annotation: Any = field.annotation
        for constraint in field.metadata:
            if isinstance(constraint, KnownIn):
                annotation = Annotated[annotation, constraint]
        rows.append((key, describe_type(annotation), default, meaning))
    return rows


def describe_default(value: Any) -> str:
    """The default as one would write it in TOML; "unset" for None."""
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "{}"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).replace("'", '"')


def describe_type(annotation: Any) -> str:
    """A type as people write it: "int", "float or unset", '"adamw" | "lion"'."""
    args = get_args(annotation)
    if not args:
        return getattr(annotation, "__name__", str(annotation))
    origin = get_origin(annotation)
    if origin is Annotated:
        names = [
            name
            for constraint in args[1:]
            if isinstance(constraint, KnownIn)
            for name in constraint.builtin
        ]
        return " | ".join([*(f'"{name}"' for name in names), describe_type(args[0])])
    if str(origin) == "typing.Literal":
        return " | ".join(f'"{value}"' for value in args)
    if origin in (list, tuple):
        return f"list of {describe_type(args[0])}"
    if origin is dict:
        return "table"
    return " or ".join("unset" if a is type(None) else describe_type(a) for a in args)
