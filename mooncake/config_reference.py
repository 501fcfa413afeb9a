"""docs/configuration.md, made from the configuration's models: `python -m mooncake.config_reference FILE`.

Owns: that page. Does not know: any key.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from mooncake.config import Config

HEAD = """# Configuration

<!-- Made by `make generate` (mooncake/config_reference.py). Change mooncake/sections.py instead. -->

A key such as `http.port` can stand in a YAML file (`--config FILE`), in the environment
(`MOONCAKE_HTTP_PORT`) and on the command line (`--http-port`); the later of these wins. An unknown key or a
bad value is an error that names it, so is a key that says which instances run here if the role has none
of them.
`mooncake-serve --print-config` shows the result of all sources.

Sizes take units (`512MiB`, `2GiB`), durations are in seconds, lists are YAML lists, or separated by commas
elsewhere.
"""
COLUMNS = "| key | values | default | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """The whole page in Markdown: the keys that stand alone, then a section for each group."""
    sections = [HEAD, "## General\n\n" + _table(Config, ())]
    for name, field in Config.model_fields.items():
        if _is_group(field):
            group: Any = field.annotation
            sections.append(f"## {name}\n\n{group.__doc__}\n\n{_table(group, (name,))}")
    return "\n".join(sections)


def _is_group(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _table(model: type[BaseModel], path: tuple[str, ...]) -> str:
    rows = [
        _row(".".join((*path, name)), field)
        for name, field in model.model_fields.items()
        if not _is_group(field)
    ]
    return COLUMNS + "".join(rows)


def _row(key: str, field: FieldInfo) -> str:
    return f"| `{key}` | {_values(field)} | {_default(field)} | {_cell(field.description or '')} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _values(field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    bounds = [_bound(part) for part in _metadata(field)]
    return _cell(" ".join(filter(None, [choices or _type_name(field.annotation), *bounds])))


def _choices(annotation: Any) -> str:
    """What a value may be, if that is a list."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f"`{choice}`" for choice in annotation)
    return ""


def _type_name(annotation: Any) -> str:
    names: dict[Any, str] = {
        bool: "true, false",
        int: "whole number",
        float: "number",
        str: "text",
        ByteSize: "size",
        Path: "path",
        type(None): "",
    }
    if annotation in names:
        return names[annotation]
    if get_origin(annotation) is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    parts = [_choices(part) or _type_name(part) for part in get_args(annotation)]
    if hasattr(annotation, "__metadata__"):  # Annotated: the first is the type
        return parts[0]
    return " or ".join(filter(None, parts))


def _metadata(field: FieldInfo) -> list[Any]:
    inner = [part for union in get_args(field.annotation) for part in getattr(union, "__metadata__", ())]
    nested = [found for part in inner if isinstance(part, FieldInfo) for found in part.metadata]
    return [*field.metadata, *inner, *nested]


def _bound(part: Any) -> str:
    match part:
        case Ge(ge):
            return f"≥ {ge}"
        case Gt(gt):
            return f"> {gt}"
        case Le(le):
            return f"≤ {le}"
        case Lt(lt):
            return f"< {lt}"
    return ""


def _default(field: FieldInfo) -> str:
    match field.default:
        case None:
            return ""
        case ByteSize() as size:
            return f"`{size.human_readable()}`"
        case bool() as value:
            return f"`{str(value).lower()}`"
        case list() as values:
            return f"`{', '.join(map(str, values))}`" if values else ""
        case "":
            return ""
    return f"`{field.default}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
