"""The build of what the RDMA machine boots from: QEMU, a kernel, an initial file system and a root image.

All of it comes as Debian packages and is unpacked in one cache folder; nothing is installed on the host.

Owns: that folder. Does not know: what the machine runs.
"""

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SUITE = "bookworm"
PYTHON = (3, 11)
"""The version of Python in that Debian suite."""
HOST_PACKAGES = ["qemu-system-x86", "busybox-static"]
ROOT_PACKAGES = [
    "python3",
    "python3-pyverbs",
    "rdma-core",
    "ibverbs-providers",
    "perftest",
    "iproute2",
    "kmod",
    "mount",
    "procps",
    "util-linux",
]
BOOT_MODULES = ["virtio_pci", "virtio_blk", "ext4", "crc32c_generic", "overlay"]
ROOT_MODULES = [
    *BOOT_MODULES,
    *("virtio_console", "virtio_rng", "9p", "9pnet_virtio", "veth"),
    *("ib_uverbs", "rdma_ucm", "rdma_rxe", "crc32_generic", "libcrc32c"),
]
FOLDER = Path(__file__).parent
NEEDED_PROGRAMS = ["apt-get", "apt-cache", "dpkg", "perl", "unshare", "chroot", "mkfs.ext4"]
MIN_FREE_MEMORY_BYTES = 4 << 30


class CannotBuildError(Exception):
    """The host cannot build or run the machine. The message says why."""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mooncake-serve" / "rdma-vm"


def say(text: str) -> None:
    print(f"rdma-vm: {text}", file=sys.stderr, flush=True)


def current_image() -> Path | None:
    """Return the folder of an image that this version of the recipe has built; None if there is none."""
    image = cache_folder() / recipe()
    return image if (image / "complete").exists() else None


def recipe() -> str:
    """Return a name for this version of the build. Each version has a folder of its own."""
    parts = [FOLDER / "image.py", FOLDER / "initramfs.sh"]
    return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()[:16]


def build() -> Path:
    """Return the image, which is built if there is none yet. Raises CannotBuildError."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "lock").touch()
    except OSError as error:
        raise CannotBuildError(f"no place to keep it: {error}") from error
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait, and then find it
        if image := current_image():
            return image
        check_host()
        for old in cache.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        # dpkg writes many small files through to the disk; memory is much faster where there is enough
        shm = Path("/dev/shm")
        has_room = shm.is_dir() and shutil.disk_usage(shm).free > MIN_FREE_MEMORY_BYTES
        with tempfile.TemporaryDirectory(prefix="rdma-vm.", dir=shm if has_room else cache) as work:
            image = cache / recipe()
            image.mkdir()
            _Build(Path(work), image).run()
        (image / "complete").touch()
        return image


def check_host() -> None:
    """Check that this host has all programs that building needs. Raises CannotBuildError."""
    check_machine()
    if os.geteuid() != 0:
        raise CannotBuildError("building needs root")
    missing = [program for program in NEEDED_PROGRAMS if shutil.which(program) is None]
    if missing:
        raise CannotBuildError(f"building needs {', '.join(missing)} (a Debian {SUITE} has them)")
    package_sources()


def check_machine() -> None:
    """Check that an image can run on this machine. Raises CannotBuildError."""
    if (sys.platform, os.uname().machine) != ("linux", "x86_64"):
        raise CannotBuildError(f"only Linux on x86-64, this is {sys.platform} on {os.uname().machine}")
    if sys.version_info[:2] != PYTHON:
        raise CannotBuildError(
            f"the machine has Python {PYTHON[0]}.{PYTHON[1]} and uses the packages of this environment,"
            f" which are for {sys.version_info[0]}.{sys.version_info[1]}"
        )


def package_sources() -> list[str]:
    """Return apt's lines for the suite, from MOONCAKE_DEBIAN_MIRROR or from what this host uses."""
    if mirror := os.environ.get("MOONCAKE_DEBIAN_MIRROR", "").rstrip("/"):
        return [
            f"deb {mirror}/debian {SUITE} main",
            f"deb {mirror}/debian-security {SUITE}-security main",
        ]
    if shutil.which("apt-get") is None:
        raise CannotBuildError("building needs apt-get")
    listing = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"])
    rows = [row.split() for row in listing.splitlines()]
    lines = {
        f"deb {' '.join(row)}"
        for row in rows
        if len(row) == 3 and row[1].startswith(SUITE) and row[2] == "main"
    }
    if not lines:
        raise CannotBuildError(f"apt has no sources for Debian {SUITE} here; set MOONCAKE_DEBIAN_MIRROR")
    return sorted(lines)


def run(command: list[str | Path], **options: object) -> str:
    """Run a step of the build, and return its output.

    Raises CannotBuildError with its last lines if it fails.
    """
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise CannotBuildError(f"{' '.join(map(str, command))[:200]} failed:\n{last}")
    return done.stdout


class _Build:
    """One build, in a folder that is removed afterwards. The results go to `image`."""

    def __init__(self, work: Path, image: Path) -> None:
        self.work, self.image = work, image
        self.start_s = time.monotonic()

    def run(self) -> None:
        self.step("downloading QEMU and a kernel")
        self.download()
        self.step(f"root file system: Debian {SUITE}")
        self.make_root()
        self.step("kernel and modules")
        self.make_kernel()
        self.step("root image")
        self.make_root_image()
        self.step("QEMU")
        self.copy_qemu()
        self.step(f"built in {self.image}")

    def step(self, text: str) -> None:
        say(f"[{time.monotonic() - self.start_s:5.1f} s] {text}")

    def download(self) -> None:
        """Unpack QEMU with all that it needs, the kernel and mmdebstrap in the work folder."""
        apt = self.work / "apt"
        for folder in ("lists/partial", "archives/partial"):
            (apt / folder).mkdir(parents=True)
        (apt / "status").touch()  # as if nothing was installed: everything that is needed is downloaded
        (apt / "sources.list").write_text("\n".join(package_sources()) + "\n")
        settings = {
            "Dir::Etc::sourcelist": apt / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State::status": apt / "status",
            "Dir::State::lists": apt / "lists",
            "Dir::Cache": apt,
            "Dir::Cache::archives": apt / "archives",
            "APT::Architecture": "amd64",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "APT::Update::Error-Mode": "any",
            "Debug::NoLocking": "true",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        run(["apt-get", *options, "-q", "update"])
        depends = run(["apt-cache", *options, "depends", "linux-image-amd64"])
        kernel = re.search(r"Depends: (linux-image-\S+-amd64)", depends)
        if kernel is None:
            raise CannotBuildError(f"linux-image-amd64 names no kernel:\n{depends}")
        # these alone: what they depend on is for installing them
        run(["apt-get", *options, "-q", "download", kernel[1], "mmdebstrap"], cwd=apt)
        run(["apt-get", *options, "-q", "-y", "--download-only", "install", *HOST_PACKAGES])
        for package in (apt / "archives").glob("*.deb"):
            run(["dpkg", "-x", package, self.work / "tools"])
        for package in apt.glob("*.deb"):
            run(["dpkg", "-x", package, self.work / package.name.split("_")[0].split("-")[0]])

    def make_root(self) -> None:
        programs = self.work / "mmdebstrap/usr/bin"
        # In namespaces of its own: its mounts are never below a folder that this program removes, and all its
        # processes end with it.
        run(
            [
                *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"),
                *("perl", programs / "mmdebstrap", "--mode=root", "--variant=apt", "--quiet"),
                *("--aptopt=APT::Install-Recommends false", "--aptopt=Acquire::Languages none"),
                "--dpkgopt=force-unsafe-io",
                *(f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")),
                *(f"--include={','.join(ROOT_PACKAGES)}", SUITE, self.work / "root"),
                *package_sources(),
            ],
            env={**os.environ, "TMPDIR": str(self.work), "PATH": f"{programs}:{os.environ['PATH']}"},
        )
        for unneeded in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(self.work / "root" / unneeded)

    def make_kernel(self) -> None:
        root, kernel = self.work / "root", self.work / "linux"
        release = next((kernel / "lib/modules").iterdir()).name
        shutil.move(kernel / "lib", root / "stage" / "lib")  # depmod is in the new root
        run(["chroot", root, "depmod", "-b", "/stage", release])
        source, target = (root / part / "lib/modules" / release for part in ("stage", "."))
        for module in modules_with_needs(source / "modules.dep", ROOT_MODULES):
            (target / module).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / module, target / module)
        for listing in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
            shutil.copy(source / listing, target / listing)
        boot = {
            Path(name).name: source / name
            for name in modules_with_needs(source / "modules.dep", BOOT_MODULES)
        }
        files = {
            "init": (FOLDER / "initramfs.sh").read_bytes(),
            "bin/busybox": (self.work / "tools/bin/busybox").read_bytes(),
            "modules.order": "\n".join(boot).encode(),
            **{f"modules/{name}": path.read_bytes() for name, path in boot.items()},
        }
        (self.image / "initramfs").write_bytes(archive(files, ["dev", "image", "layer", "root"]))
        shutil.rmtree(root / "stage")
        run(["chroot", root, "depmod", release])
        packed = (kernel / "boot" / f"vmlinuz-{release}").read_bytes()
        (self.image / "kernel").write_bytes(unpacked_kernel(packed) or packed)

    def make_root_image(self) -> None:
        root, image = self.work / "root", self.image / "root.img"
        used_mib = int(run(["du", "-sxm", root]).split()[0])
        with open(image, "wb") as file:
            file.truncate((used_mib * 13 // 10 + 64) << 20)
        features = "^has_journal,^metadata_csum"
        run(["mkfs.ext4", "-q", "-F", "-O", features, "-m", "0", "-d", root, image])

    def copy_qemu(self) -> None:
        """Copy QEMU with its dynamic loader and libraries, so that the host's are not used."""
        for part in ("lib64", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/share/qemu"):
            shutil.copytree(self.work / "tools" / part, self.image / "qemu" / part, symlinks=True)
        for optional in ("usr/share/seabios", "usr/lib/ipxe"):
            if (self.work / "tools" / optional).is_dir():
                shutil.copytree(self.work / "tools" / optional, self.image / "qemu" / optional, symlinks=True)
        (self.image / "qemu/usr/bin").mkdir(parents=True)
        shutil.copy(self.work / "tools/usr/bin/qemu-system-x86_64", self.image / "qemu/usr/bin")


def unpacked_kernel(packed: bytes) -> bytes | None:
    """Return the ELF file in a packed kernel; None if there is none.

    QEMU starts it directly, so it need not be unpacked in emulation at every boot.
    """
    start = packed.find(b"\xfd7zXZ\x00")
    if start < 0:
        return None
    try:
        kernel = lzma.LZMADecompressor().decompress(packed[start:])
    except lzma.LZMAError:
        return None
    return kernel if kernel.startswith(b"\x7fELF") else None


def modules_with_needs(dependencies: Path, names: list[str]) -> list[str]:
    """Return the paths of the named modules and of those that they need, in loading order.

    Modules that are built into the kernel have no path.
    """
    needs = {}
    for line in dependencies.read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    paths = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    order: dict[str, None] = {}

    def add(path: str) -> None:
        for needed in needs[path]:
            add(needed)
        order[path] = None

    for name in names:
        if name in paths:
            add(paths[name])
    return list(order)


def archive(files: dict[str, bytes], folders: Sequence[str] = ()) -> bytes:
    """Return a cpio archive ("newc", as the kernel unpacks it) of executable files, with their folders."""
    parents = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
    entries = [(name, 0o040755, b"") for name in sorted(parents.union(folders))]
    entries += [(name, 0o100755, content) for name, content in files.items()]
    out = bytearray()
    for number, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        raw_name = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(raw_name), 0)
        out += b"070701" + b"".join(b"%08x" % field for field in fields) + raw_name
        out += bytes(-len(out) % 4)
        out += content
        out += bytes(-len(out) % 4)
    return bytes(out + bytes(-len(out) % 512))
