"""Checks of the machine itself: Python, compiled code, memory, limits, clock, the cluster's key.

Owns: these checks. Does not know: devices, networks.
"""

import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from messenger.doctor.findings import Finding, Level, as_size
from messenger.doctor.machine import Machine
from mooncake.config.settings import Config
from mooncake.errors import ConfigError
from mooncake.node.memory import group_bytes, machine_bytes
from mooncake.security.keys import ClusterKey

OLDEST_PYTHON, FIRST_UNSUPPORTED_PYTHON = (3, 11), (3, 14)
MESSENGER_MODULE = "kvstore.server.service"
_OTHER_FILES = 512
"""Number of descriptors that a process needs beside the descriptors of its requests."""
_LARGE_POOL_BYTES = 8 << 30
"""The check advises huge pages for pools of this many bytes or more."""
_LONGEST_REASON = 300
"""The most characters of a compiler's message that are shown."""
_SLOW_CLOCKS = ("acpi_pm", "hpet", "jiffies")


def num_instances(config: Config) -> int:
    """Return the number of pools on this node."""
    return sum(config.num_instances.values())


def python(machine: Machine, version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """Yield findings about the interpreter and the operating system."""
    kernel = machine.read("proc/sys/kernel/osrelease") or "unknown"
    found = f"Python {'.'.join(map(str, version))} on {platform.system()} {kernel}, {platform.machine()}"
    if not OLDEST_PYTHON <= version < FIRST_UNSUPPORTED_PYTHON:
        yield Finding(Level.FAIL, "python", found, "install Python 3.11, 3.12 or 3.13")
    elif platform.system() != "Linux":
        yield Finding(Level.FAIL, "python", found, "use Linux: shared memory and sockets are Linux's")
    else:
        yield Finding(Level.OK, "python", found)


def native_code(load: Callable[[Path], object], sources: list[Path]) -> Iterator[Finding]:
    """Yield findings about the compilation and loading of every C++ file.

    The first compilation takes some seconds.
    """
    for source in sources:
        try:
            load(source)
        except ConfigError as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON]  # a compiler may say a lot
            advice = "correct that: without it bytes are copied and checked more slowly"
            yield Finding(Level.WARN, "native code", reason, advice)
            return
    yield Finding(
        Level.OK, "native code", f"{', '.join(source.name for source in sources)} compiled and loaded"
    )


def cpu_kernels(answer: Callable[[], str]) -> Iterator[Finding]:
    """Yield findings about the kernels that a worker on the CPU would use.

    `answer` returns the name of an instruction set, or `torch` and a reason.
    """
    name, _, reason = answer().partition(" ")
    if name == "torch":
        found = f"torch computes: {' '.join(reason.split())}"[:_LONGEST_REASON]
        advice = "correct that if workers use the CPU: they are half as fast, or less"
        yield Finding(Level.WARN, "cpu kernels", found, advice)
    else:
        yield Finding(Level.OK, "cpu kernels", f"compiled and loaded for {name}")


def memory(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about room for the pools: in memory, in the control group, in their file system."""
    num_pools = num_instances(config)
    wanted_bytes = num_pools * int(config.kvcache.pool_bytes)
    found = f"the {'pool takes' if num_pools == 1 else 'pools take'} {as_size(wanted_bytes)}"
    if any(process.name == MESSENGER_MODULE for process in machine.processes()):
        yield Finding(Level.OK, "memory", f"{found}; pools are running here and have theirs")
        return
    room = {"of memory are available": machine_bytes(machine.root)}
    room["are left in this control group"] = group_bytes(machine.root)
    segment_dir = config.kvcache.segment_dir
    if segment_dir is not None:
        room[f"are free in {segment_dir}"] = machine.free_bytes(segment_dir)
    known = {where: num_bytes for where, num_bytes in room.items() if num_bytes is not None}
    if not known:
        yield Finding(Level.WARN, "memory", f"{found}; what is available cannot be read")
        return
    where, least_bytes = min(known.items(), key=lambda item: item[1])
    found += f", {as_size(least_bytes)} {where}"
    if wanted_bytes <= least_bytes:
        yield Finding(Level.OK, "memory", found)
    else:
        advice = f"lower kvcache.pool_bytes (now {as_size(int(config.kvcache.pool_bytes))} an instance)"
        advice += " or give the container more memory" if "group" in where else ""
        advice += "; docker's --shm-size sets the size of /dev/shm" if "/dev/shm" in where else ""
        yield Finding(Level.FAIL, "memory", found, advice)


def open_files(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about the limit of file descriptors: each request and each stream needs a descriptor."""
    limit = machine.limit("Max open files")
    needed = _OTHER_FILES + config.conductor.max_running_requests
    if limit is not None and limit < needed:
        found = f"{limit} files may be open, {needed} can be needed"
        yield Finding(
            Level.WARN,
            "open files",
            found,
            "raise it: ulimit -n 65536, LimitNOFILE=65536, --ulimit nofile=65536",
        )
    else:
        yield Finding(Level.OK, "open files", f"{limit or 'any number of'} files may be open")


def huge_pages(machine: Machine, config: Config) -> Iterator[Finding]:
    """Yield findings about huge pages for the pool.

    Memory in huge pages is faster to copy and to register.
    """
    folder = "sys/kernel/mm/transparent_hugepage"
    chosen = re.search(r"\[(\w+)\]", machine.read(f"{folder}/shmem_enabled") or "")
    mode = chosen[1] if chosen is not None else "not supported"
    reserved = re.search(r"^HugePages_Total:\s*(\d+)", machine.read("proc/meminfo") or "", re.MULTILINE)
    found = f"shared memory: {mode}; {reserved[1] if reserved else 0} pages reserved"
    is_off = mode not in ("always", "advise", "within_size", "force") and config.kvcache.segment_dir is None
    if is_off and config.kvcache.pool_bytes >= _LARGE_POOL_BYTES:
        advice = f"as root: echo advise > /{folder}/shmem_enabled (faster copies and registration)"
        yield Finding(Level.WARN, "huge pages", found, advice)
    else:
        yield Finding(Level.OK, "huge pages", found)


def clock(machine: Machine) -> Iterator[Finding]:
    """Yield findings about the clock: its source and its synchronisation.

    Synchronisation matters only for times in logs.
    """
    source = machine.read("sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
    answer = machine.run("timedatectl", "show", "--property=NTPSynchronized", "--value")
    synchronised = {"yes": "synchronised", "no": "not synchronised"}.get(answer or "", "perhaps synchronised")
    found = f"{source}, {synchronised}; only the times in logs depend on that"
    if source in _SLOW_CLOCKS:
        advice = "reading this clock is slow; boot with clocksource=tsc if the processor is sound"
        yield Finding(Level.WARN, "clock", found, advice)
    else:
        yield Finding(Level.OK, "clock", found)


def cluster_key(path: Path | None, load: Callable[[Path], ClusterKey], config: Config) -> Iterator[Finding]:
    """Yield findings about the cluster key: that it exists, and is private."""
    title = "cluster key"
    if path is None and config.is_alone:
        yield Finding(Level.OK, title, f"role {config.role} makes one for each run")
    elif path is None:
        advice = "mooncake-serve keygen FILE on one node, copy it to all, set security.key_file"
        yield Finding(Level.FAIL, title, f"role {config.role} needs one, and none is configured", advice)
    else:
        try:
            key = load(path)
        except ConfigError as error:  # the message says what to do
            yield Finding(Level.FAIL, title, str(error))
        else:
            found = f"{path} is private; its id, {key.key_id}, must be the same on all nodes"
            yield Finding(Level.OK, title, found)
