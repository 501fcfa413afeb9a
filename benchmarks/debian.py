"""Programs that only tests and benchmarks need, unpacked from Debian's packages without installation.

A cache folder gets each package, and those of its dependencies that are not installed on this host.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

SUITE = "bookworm"
TIMEOUT_S = 300.0
LIBRARIES = "usr/lib/x86_64-linux-gnu"


class CannotFetchError(Exception):
    """The error for a program that cannot be fetched on this host. The message says why."""


def environment(package: str) -> dict[str, str]:
    """Return the environment in which the programs of this package find their libraries."""
    libraries = _cache() / package / LIBRARIES
    private = sorted({str(path.parent) for path in libraries.glob("*/*.so*")})  # else found by absolute paths
    return {**os.environ, "LD_LIBRARY_PATH": ":".join([str(libraries), *private])}


def fetch(package: str) -> Path:
    """Return the folder with the unpacked package, fetched if needed. Raises CannotFetchError."""
    folder = _cache() / package
    _cache().mkdir(parents=True, exist_ok=True)
    with open(_cache() / f"{package}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others wait, and then find it
        if not folder.exists():
            _check_host()
            with tempfile.TemporaryDirectory(dir=_cache()) as work:
                _unpack(package, Path(work))
                (Path(work) / "root").rename(folder)
    return folder


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mooncake-serve" / "debian"


def _check_host() -> None:
    missing = [program for program in ("apt-get", "dpkg") if shutil.which(program) is None]
    if missing:
        raise CannotFetchError(f"this host has no {' and no '.join(missing)}")
    release = Path("/etc/os-release").read_text()
    if f"VERSION_CODENAME={SUITE}" not in release:
        raise CannotFetchError(f"its libraries are those of Debian {SUITE}, which this host is not")


def _unpack(package: str, work: Path) -> None:
    for folder in ("lists/partial", "archives/partial", "root"):
        (work / folder).mkdir(parents=True)
    try:
        _download(package, work, {})
    except CannotFetchError:  # this host has no lists, or old ones
        own_lists = {"Dir::State::lists": work / "lists"}
        _apt_get(work, own_lists, "update")
        _download(package, work, own_lists)
    for archive in (work / "archives").glob("*.deb"):
        _run("dpkg", "-x", str(archive), str(work / "root"))


def _download(package: str, work: Path, settings: Mapping[str, Path]) -> None:
    _apt_get(work, settings, "-y", "--download-only", "--reinstall", "install", package)


def _apt_get(work: Path, more_settings: Mapping[str, Path], *arguments: str) -> None:
    settings = {
        **more_settings,
        "Dir::Cache": work,
        "Dir::Cache::archives": work / "archives",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
        "Debug::NoLocking": "true",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    _run("apt-get", *options, "-q", *arguments)


def _run(*command: str) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise CannotFetchError(f"{command[0]} did not end within {TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        last = " / ".join(error.stdout.splitlines()[-5:])
        raise CannotFetchError(f"{' '.join(command)[-100:]} failed: {last}") from None
