"""The identity of a messenger: the facts that two messengers compare before they exchange bytes.

Owns: host identity. Does not know: connections.
"""

import os
from pathlib import Path

import msgspec

from mooncake.messages.blocks import KVLayout


class Identity(msgspec.Struct, frozen=True):
    """The name of a messenger, and the facts that give its KVCache bytes their meaning.

    Messengers with equal `fingerprint` may exchange bytes if their `layout`s are shards of the same blocks.
    """

    instance: str
    incarnation: int
    host_id: str
    fingerprint: str
    layout: KVLayout


def host_id() -> str:
    """Return a name for the set of processes that can reach each other's Unix sockets by path.

    Two containers on one machine have the same boot id and different file systems. So the name has the mount
    namespace too.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{os.stat('/proc/self/ns/mnt').st_ino}"
