"""Documentation of every key, rendered from the sections themselves."""

from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from jaxtrain.config.base import KnownIn, members, section_type
from jaxtrain.config.load import kind_of
from jaxtrain.config.root import Config
from jaxtrain.config.task import TaskSection


def render_markdown() -> str:
    """docs/reference/config.md: a table per section with key, type, default and meaning."""
    lines = [
        "# Config reference",
        "",
        "Every key with its type and default. This page is generated:"
        " `python -m jaxtrain.main docs > docs/reference/config.md`.",
    ]
    for title, section in list_sections():
        lines += ["", f"## {title}", "", section.__doc__ or "", ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, kind, default, meaning in list_keys(section):
            kind = kind.replace("|", "\\|")
            lines.append(f"| `{key}` | {kind} | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


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
