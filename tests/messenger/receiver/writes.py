"""Frames of a sender that tests write by hand."""

from messenger.wire.messages import (
    Message,
    Write,
    WriteEntry,
)
from tests.messenger.fabric import Fabric

SESSION = b"s" * 16
Said = tuple[Message, bytes]


def entry(node: Fabric, of_page: int, **changed: object) -> WriteEntry:
    fields = {name: getattr(node.entry(of_page), name) for name in WriteEntry.__struct_fields__}
    return WriteEntry(**{**fields, **changed})


def write(node: Fabric, *entries: WriteEntry, grant_id: int = 1) -> Said:
    """Send a write with these entries, and the bytes that they name in the sender's memory."""
    payload = b"".join(bytes(node.sender_memory.page(e.page)) for e in entries)
    return Write(7, grant_id, list(entries)), payload
