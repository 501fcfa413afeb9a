"""The comparison of two schemas: whether one tree reads what the other one writes."""

from collections.abc import Iterator
from typing import NamedTuple

from tests.compatibility.schema import Schema, Type


class Unknown(NamedTuple):
    """A name that is written and that the reader does not know: `Struct`, `Struct.field` or a value."""

    name: str


class Misread(NamedTuple):
    """A place that the reader cannot read, or reads with another meaning."""

    where: str
    reason: str


Difference = Unknown | Misread


def differences(writer: Schema, reader: Schema, link: str) -> Iterator[Difference]:
    """Yield the differences between what is written on a link and what is read."""
    yield from _Comparison(writer, reader).of(writer.links[link], reader.links[link], link)


class _Comparison:
    def __init__(self, writer: Schema, reader: Schema) -> None:
        self._writer, self._reader = writer, reader
        self._seen: set[tuple[str, str]] = set()

    def of(self, written: Type, read: Type, where: str) -> Iterator[Difference]:
        for one in _parts(written):
            found = [self._one(one, other, where) for other in _parts(read) if self._may_be(one, other)]
            if not found and one[0] == "struct":
                yield Unknown(self._writer.structs[one[1]].tag or one[1])
            elif not found:
                yield Misread(where, f"{one} is written, {read} is read")
            else:
                yield from min(map(list, found), key=len)

    def _may_be(self, written: Type, read: Type) -> bool:
        """Return whether a value of type `written` can be read as type `read`."""
        if written[0] == read[0] == "struct":
            return self._writer.structs[written[1]].tag == self._reader.structs[read[1]].tag
        return (written[0], read[0]) in _SAME_KIND or written[0] == read[0]

    def _one(self, written: Type, read: Type, where: str) -> Iterator[Difference]:
        kind, *of_written = written
        _, *of_read = read
        match kind:
            case "struct":
                if (pair := (of_written[0], of_read[0])) not in self._seen:
                    self._seen.add(pair)
                    yield from self._struct(*pair)
            case "one of" if read[0] == kind:
                for value in of_written:
                    if value not in of_read:
                        yield Unknown(f"{where}: {value}")
            case "int" | "float" | "str" | "bytes" if read[0] == kind:
                if not _is_within(of_written, of_read):
                    yield Misread(where, f"{kind} within {of_written} is written, within {of_read} is read")
            case "list" | "map" | "array":
                if len(of_written) != len(of_read):
                    yield Misread(where, f"{len(of_written)} values are written, {len(of_read)} are read")
                for one, other in zip(of_written, of_read, strict=False):
                    yield from self.of(one, other, where)

    def _struct(self, written_name: str, read_name: str) -> Iterator[Difference]:
        written, read = self._writer.structs[written_name], self._reader.structs[read_name]
        if written.is_array != read.is_array:
            yield Misread(written_name, "a map on one side is an array on the other")
            return
        by_name = {field.name: field for field in read.fields}
        for number, field in enumerate(written.fields):
            where, known = f"{_short(written_name)}.{field.name}", by_name.pop(field.name, None)
            if written.is_array and number < len(read.fields) and read.fields[number].name != field.name:
                yield Misread(where, f"has the place of {read.fields[number].name}: an array has no names")
            elif known is None:
                yield Unknown(where)
            else:
                yield from self.of(field.type, known.type, where)
                if written.omits_defaults and field.default and field.default != known.default:
                    yield Misread(where, "has another default, and defaults are not sent")
        for field in by_name.values():
            if not field.default:
                yield Misread(f"{_short(read_name)}.{field.name}", "is required, and not written")


def _short(struct: str) -> str:
    return struct.rpartition(".")[2]


def _parts(type_: Type) -> list[Type]:
    return type_[1:] if type_[0] == "union" else [type_]


_SAME_KIND = {("int", "float"), ("one of", "str")}


def _is_within(written: list[int | None], read: list[int | None]) -> bool:
    """Return whether the bounds of written values are within the bounds of read values."""
    (least, most), (least_read, most_read) = written, read
    return (least_read is None or (least is not None and least >= least_read)) and (
        most_read is None or (most is not None and most <= most_read)
    )
