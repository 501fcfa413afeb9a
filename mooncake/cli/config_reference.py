"""The page docs/configuration.md, made from the configuration's models by `make generate`.

Owns: that page. Does not know: any key.
"""

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from mooncake.config.settings import Config, default_of

HEAD = """# Configuration

<!-- Made by `make generate`. Change mooncake/config/sections.py instead. -->

A key such as `http.port` can stand in a YAML file (`--config FILE`), in the environment
(`MOONCAKE_HTTP_PORT`) and on the command line (`--http-port`); the later of these wins. An unknown key or a
bad value is an error that names it and the nearest key that exists, so is a key that says which instances
run here if the role has none of them. Flags have no abbreviations.
`.venv/bin/mooncake-serve --help` shows the flags that are needed first, `--help-all` all of them, and
`--print-config` the result of all sources.

In a file keys stand below the name of their section:

```yaml
role: all
http:
  port: 8001
kvcache:
  pool_bytes: 4GiB
```

Sizes take units (`512MiB`, `2GiB`), durations are in seconds, lists are YAML lists, or separated by commas
elsewhere.
"""
_KINDS: dict[Any, str] = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    ByteSize: "size",
    Path: "path",
}
COLUMNS = "| key | values | default | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """Return docs/configuration.md: the keys outside all sections, then a section for each group of keys."""
    sections = [HEAD, "## General\n\n" + _table(Config, ())]
    for name, field in Config.model_fields.items():
        if _is_group(field):
            group: Any = field.annotation
            sections.append(f"## {name}\n\n{group.__doc__}\n\n{_table(group, (name,))}")
    return "\n".join(sections)


def _is_group(field: FieldInfo) -> bool:
    return _is_a(field.annotation, BaseModel)


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
    return _cell(_kind(field.annotation, field.metadata))


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return the type of a value with its bounds, as text; empty for None."""
    if get_origin(annotation) is Annotated:
        inner, *parts = get_args(annotation)
        nested = [found for part in parts for found in getattr(part, "metadata", [part])]
        return _kind(inner, [*nested, *metadata])
    if get_origin(annotation) is Literal or _is_a(annotation, StrEnum):
        choices = get_args(annotation) or tuple(annotation)
        return ", ".join(f"`{choice}`" for choice in choices)
    if get_origin(annotation) is list:
        return f"list of {_kind(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "object, as JSON outside YAML"
    if alternatives := get_args(annotation):
        return " or ".join(filter(None, (_kind(one, metadata) for one in alternatives)))
    return _KINDS[annotation] + _bounds(metadata) if annotation is not NoneType else ""


def _is_a(annotation: Any, base: type) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, base)


def _bounds(metadata: Sequence[Any]) -> str:
    low, high = "", ""
    for part in metadata:
        match part:
            case Ge(ge):
                low = f"≥ {ge}"
            case Gt(gt):
                low = f"> {gt}"
            case Le(le):
                high = f"≤ {le}"
            case Lt(lt):
                high = f"< {lt}"
    if low.startswith("≥") and high.startswith("≤"):
        return f" from {low[2:]} to {high[2:]}"
    return " " + " and ".join(filter(None, (low, high))) if low or high else ""


def _default(field: FieldInfo) -> str:
    default = default_of(field)
    return f"`{default}`" if default else ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
