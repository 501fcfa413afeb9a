"""A run of the machine for one command, whose output is carried to this process.

Owns: the QEMU process. Does not know: how the image was made, what the command is.
"""

import contextlib
import os
import select
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.rdma.vm.image import FOLDER, archive

MEMORY_MIB = 2048
NUM_CPUS = min(4, os.cpu_count() or 1)
# Emulation copies byte by byte with the instructions of erms and fsrm; and rxe checksums every packet, for
# which tables are faster than an emulated pclmulqdq.
CPU = "max,erms=off,fsrm=off,pclmulqdq=off"
KERNEL_OPTIONS = (
    "console=ttyS0 loglevel=4 panic=-1 mitigations=off nokaslr audit=0 tsc=reliable no_timer_check"
    " random.trust_cpu=on random.trust_bootloader=on"
)


class MachineError(Exception):
    """The machine did not run the command to its end. The message has the last lines of the console."""


def run_command(
    image: Path,
    command: Sequence[str],
    *,
    folders: Sequence[Path],
    environment: dict[str, str],
    timeout_s: float,
    on_output: Callable[[bytes], None],
) -> int:
    """Run `command` in the machine, and return its exit status.

    It runs as root in the first of `folders`, all of which are mounted read-only under their own paths.
    Raises MachineError, and TimeoutError after `timeout_s` seconds.
    """
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    boot_files = {
        "boot/init.sh": (FOLDER / "init.sh").read_bytes(),
        "boot/mounts": "".join(f"folder{n}\t{path}\n" for n, path in enumerate(folders)).encode(),
        "boot/command": f"{exports}cd {shlex.quote(str(folders[0]))}\nexec {shlex.join(command)}\n".encode(),
    }
    with tempfile.TemporaryDirectory(prefix="rdma-vm.") as work, contextlib.ExitStack() as stack:
        console, log = Path(work) / "console", Path(work) / "qemu"
        initramfs = Path(work) / "initramfs"
        initramfs.write_bytes((image / "initramfs").read_bytes() + archive(boot_files))
        ports, their_ports = {}, {}
        for name in ("output", "control"):
            ports[name], their_ports[name] = map(stack.enter_context, socket.socketpair())
        arguments = [
            *("setpriv", "--pdeathsig", "KILL"),  # it dies with this thread
            *_qemu(image),
            *("-machine", "q35,vmport=off,hpet=off", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", CPU),
            *("-smp", str(NUM_CPUS), "-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config", "-no-reboot"),
            *(
                "-display",
                "none",
                "-chardev",
                f"file,id=console,path={console}",
                "-serial",
                "chardev:console",
            ),
            *("-kernel", str(image / "kernel"), "-initrd", str(initramfs), "-append", KERNEL_OPTIONS),
            *("-drive", f"if=none,id=root,format=raw,readonly=on,file.locking=off,file={image / 'root.img'}"),
            *("-device", "virtio-blk-pci,drive=root", "-device", "virtio-rng-pci"),
            *("-device", "virtio-serial-pci"),
        ]
        for name, port in their_ports.items():
            arguments += ["-chardev", f"socket,id={name},fd={port.fileno()}"]
            arguments += ["-device", f"virtserialport,chardev={name},name=vm.{name}"]
        for n, folder in enumerate(folders):
            tag, options = f"folder{n}", "security_model=none,multidevs=remap,readonly=on"
            arguments += ["-fsdev", f"local,id={tag},path={folder},{options}"]
            arguments += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        qemu = subprocess.Popen(
            arguments,
            env={**os.environ, "QEMU_MODULE_DIR": str(image / "qemu/usr/lib/x86_64-linux-gnu/qemu")},
            stdin=subprocess.DEVNULL,
            stdout=stack.enter_context(open(log, "wb")),
            stderr=subprocess.STDOUT,
            pass_fds=[port.fileno() for port in their_ports.values()],
        )
        stack.callback(_end, qemu)
        for port in their_ports.values():
            port.close()
        control = _carry(ports["output"], ports["control"], time.monotonic() + timeout_s, on_output)
        reports = dict(line.partition(" ")[::2] for line in control.decode().splitlines())
        if "status" in reports:
            return int(reports["status"])
        logs = [path.read_text(errors="replace").splitlines() for path in (log, console)]
        last_lines = "\n".join(f"  | {line}" for lines in logs for line in lines[-30:])
        reason = reports.get("error", "no reason given")
        raise MachineError(f"the machine ended before the command did: {reason}\n{last_lines}")


def _carry(
    output: socket.socket, control: socket.socket, deadline_s: float, on_output: Callable[[bytes], None]
) -> bytes:
    """Pass output on until the machine has ended. Returns what came over `control`."""
    said = bytearray()
    still_open = {output, control}
    while still_open:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the command did not end in time")
        for port in select.select(list(still_open), [], [], left_s)[0]:
            try:
                data = port.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                still_open.discard(port)
            elif port is control:
                said += data
            else:
                on_output(data)
    return bytes(said)


def _qemu(image: Path) -> list[str]:
    """Return the command line that starts QEMU through the dynamic loader that came with it."""
    home = image / "qemu"
    libraries = f"{home / 'lib/x86_64-linux-gnu'}:{home / 'usr/lib/x86_64-linux-gnu'}"
    firmware = [home / part for part in ("usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu")]
    return [
        str(home / "lib64/ld-linux-x86-64.so.2"),
        *("--library-path", libraries, str(home / "usr/bin/qemu-system-x86_64")),
        *(word for folder in firmware for word in ("-L", str(folder))),
    ]


def _end(qemu: "subprocess.Popen[bytes]") -> None:
    """End QEMU, whatever it does. It has no data that could be lost."""
    qemu.kill()
    qemu.wait()
