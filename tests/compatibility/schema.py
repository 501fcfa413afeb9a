"""The form of all messages between nodes, as JSON.

`.venv/bin/python -m tests.compatibility.schema` records it in `last_release.json`, with HEAD's commit. This
is done after a release, while HEAD is the released commit; then `NEW` of `test_messages` is emptied.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from kvstore.protocol import answers, calls
from messenger.wire import messages, protocol
from messenger.wire.checksums import layer_checksums
from mooncake.leadership.leaders import Candidate
from mooncake.messages.blocks import KVLayout, block_keys, model_fingerprint, root_key
from mooncake.messages.fronts import FromFront, ToFront
from mooncake.messages.kv_events import FromKVEvents, ToKVEvents
from mooncake.messages.workers import SPOKEN, FromWorker, ToWorker
from mooncake.security import greeting
from mooncake.versions import Versions
from workers.groups.rank_messages import FromFollower, FromLeader

RECORD = Path(__file__).parent / "last_release.json"
PROTOCOLS: dict[str, tuple[Versions, dict[str, Any]]] = {
    "cluster": (
        SPOKEN,
        {
            "worker to conductor": FromWorker,
            "conductor to worker": ToWorker,
            "front to conductor": FromFront,
            "conductor or worker to front": ToFront,
            "messenger to conductor": FromKVEvents,
            "conductor to messenger": ToKVEvents,
            "conductor to etcd": Candidate,
        },
    ),
    "messengers": (protocol.SPOKEN, {"messenger to messenger": messages.Message}),
    "pool": (
        calls.SPOKEN,
        {
            "client to pool": greeting.Greeting | greeting.Proof | calls.ToRemotePool,
            "pool to client": greeting.Challenge | answers.FromRemotePool,
        },
    ),
}
"""The protocols between nodes: the versions that this tree speaks, and the messages of each link."""
WITHIN_INSTANCE = {"follower to leader": FromFollower, "leader to follower": FromLeader}
"""Links between stages or ranks of one instance. Their version is that of "cluster"."""

Type = list[Any]
"""A type: its kind, then the parts of the kind. For `["struct", name]` the form is in `Schema.structs`."""


class Field(msgspec.Struct, frozen=True, array_like=True):
    name: str
    type: Type
    default: list[Any]
    """A list with the default; empty if the field is required."""


class Form(msgspec.Struct, frozen=True):
    """The form of a struct. If it is an array, its fields are known by their positions, not by names."""

    tag: str | None
    is_array: bool
    omits_defaults: bool
    fields: list[Field]


class Schema(msgspec.Struct, frozen=True):
    commit: str
    """The commit whose messages have this schema."""
    versions: dict[str, int]
    """The newest version of each protocol."""
    links: dict[str, Type]
    structs: dict[str, Form]
    values: dict[str, str]
    """The keys and checksums of example blocks, and the fingerprint of a model."""


def schema_of(commit: str) -> Schema:
    """Return the schema of this tree."""
    structs: dict[str, Form] = {}
    links = {name: type_ for _, of_one in PROTOCOLS.values() for name, type_ in of_one.items()}
    links |= WITHIN_INSTANCE
    infos = inspect.multi_type_info(list(links.values()))
    return Schema(
        commit,
        {name: versions.newest for name, (versions, _) in PROTOCOLS.items()},
        {name: _type(info, structs) for name, info in zip(links, infos, strict=True)},
        structs,
        _values(),
    )


def _type(info: Any, structs: dict[str, Form]) -> Type:
    def of(part: Any) -> Type:
        return _type(part, structs)

    match info:
        case inspect.UnionType(types=types):
            return ["union", *map(of, types)]
        case inspect.IntType():
            return ["int", info.ge, info.le if info.lt is None else info.lt - 1]
        case inspect.FloatType():
            return ["float", info.ge, info.le]
        case inspect.StrType() | inspect.BytesType():
            kind = "str" if isinstance(info, inspect.StrType) else "bytes"
            return [kind, info.min_length, info.max_length]
        case inspect.EnumType(cls=cls):
            return ["one of", *(member.value for member in cls)]
        case inspect.LiteralType(values=values):
            return ["one of", *values]
        case inspect.TupleType(item_types=item_types):
            return ["array", *map(of, item_types)]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            assert (info.min_length, info.max_length) == (None, None)
            return ["list", of(info.item_type)]
        case inspect.DictType():
            return ["map", of(info.key_type), of(info.value_type)]
        case inspect.NamedTupleType(fields=fields):
            assert all(field.required for field in fields)
            return ["array", *(of(field.type) for field in fields)]
        case inspect.StructType():
            return _struct(info, structs)
        case inspect.BoolType():
            return ["bool"]
    assert isinstance(info, inspect.NoneType), info
    return ["none"]


def _struct(info: inspect.StructType, structs: dict[str, Form]) -> Type:
    cls = info.cls
    name = cls.__name__ if cls.__module__.startswith("mooncake.") else f"{cls.__module__}.{cls.__name__}"
    if name not in structs:
        assert not info.forbid_unknown_fields, f"{name}: readers ignore what they do not know"
        assert info.tag is None or isinstance(info.tag, str)
        structs[name] = Form(None, False, False, [])  # it may contain itself
        fields = [
            Field(field.encode_name, _type(field.type, structs), _default(field)) for field in info.fields
        ]
        structs[name] = Form(info.tag, info.array_like, cls.__struct_config__.omit_defaults, fields)
    return ["struct", name]


def _default(field: inspect.Field) -> list[Any]:
    if field.required:
        return []
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return [msgspec.to_builtins(default)]


def _values() -> dict[str, str]:
    layout = KVLayout(4, 2, 16, 8, "bfloat16")
    keys = block_keys(range(3, 27), layout.block_size, root_key("a model", "a salt", "an adapter"))
    layers = bytes(range(256)) * 4
    return {
        "keys of blocks": b"".join(keys).hex(),
        "fingerprint of a model": model_fingerprint("llama", "weights", layout.dtype, layout),
        "checksums of layers": layer_checksums(memoryview(layers), len(layers) // 2).hex(),
    }


def recorded() -> Schema:
    """Return the schema of the last release."""
    return msgspec.json.decode(RECORD.read_bytes(), type=Schema)


def _one_line_each(entries: dict[str, Any]) -> str:
    lines: Sequence[str] = [
        f"  {msgspec.json.encode(name).decode()}: {msgspec.json.encode(entry).decode()}"
        for name, entry in sorted(entries.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n }"


def save(schema: Schema) -> None:
    """Write a schema to its file, with a line for each struct, so that differences can be read."""
    parts = [
        f' "commit": "{schema.commit}"',
        *(
            f' "{name}": {_one_line_each(getattr(schema, name))}'
            for name in ("versions", "links", "structs", "values")
        ),
    ]
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    save(schema_of(head.stdout.strip()))
