"""Small C++ files, compiled for this machine when they are first needed, and loaded by ctypes.

A library is kept in the user's cache. Its name is made of its source, the headers beside it, the flags, the
compiler and the processor. So it is compiled once a machine, and again after a change of any of these. The
compiler is `$CXX`, else `c++`.

Owns: compiling, the cache. Does not know: the contents of the files.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from mooncake.errors import ConfigError

log = logging.getLogger(__name__)
compile_log = logging.getLogger(f"{__name__}.compiling")
"""The logger of compilations. Each is reported at INFO, as a compilation may take a minute."""

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
THIS_PROCESSOR = ("-march=native",)
ENV_CACHE = "XDG_CACHE_HOME"
_TIMEOUT_S = 120.0


class NativeCodeError(ConfigError):
    """A file cannot be compiled, kept or loaded on this machine."""


class NoCompilerError(NativeCodeError):
    """There is no C++ compiler on this machine."""


@functools.cache
def load(source: Path, flags: tuple[str, ...] = THIS_PROCESSOR) -> ctypes.CDLL:
    """Return the compiled library of `source`, built with `FLAGS` and `flags`.

    Calls of the library release the GIL. Raises NoCompilerError, or NativeCodeError if the file cannot be
    compiled, kept or loaded here.
    """
    compiler = os.environ.get("CXX") or "c++"
    if shutil.which(compiler) is None:
        raise NoCompilerError(f"no C++ compiler: {compiler} is not installed (Debian: apt install g++)")
    try:
        library = _cache() / f"{source.stem}-{_digest(source, flags, compiler)}.so"
        if not library.exists():
            _compile(compiler, source, flags, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NativeCodeError(
            f"cannot compile and load {source.name} in {ENV_CACHE} or ~/.cache: {error}"
        ) from error


def load_or_do_without(
    source: Path, otherwise: str, flags: tuple[str, ...] = THIS_PROCESSOR
) -> ctypes.CDLL | None:
    """Return the library of `source`; None if it cannot be loaded.

    Then a warning is logged that begins with `otherwise`.
    """
    try:
        return load(source, flags)
    except NativeCodeError as error:
        # A log record with the error itself would keep the callers' objects alive.
        log.warning("%s: %s", otherwise, str(error))
        return None


def _cache() -> Path:
    base = Path(os.environ.get(ENV_CACHE) or Path.home() / ".cache")
    directory = base / "mooncake-serve" / "native"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _digest(source: Path, flags: tuple[str, ...], compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=False, timeout=_TIMEOUT_S
    ).stdout
    headers = [path.read_bytes() for path in sorted(source.parent.glob("*.h"))]
    parts = [source.read_bytes(), *headers, " ".join(FLAGS + flags).encode(), version, _processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    """Return bytes that stand for the processor's features, on which `-march=native` depends."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_bytes().splitlines():
            if line.startswith((b"flags", b"Features")):
                return line
    return os.uname().machine.encode()


def _compile(compiler: str, source: Path, flags: tuple[str, ...], library: Path) -> None:
    """Compile under a temporary name, then rename, so that no process loads an unfinished library."""
    compile_log.info("compiling %s for this machine, once", source.name)
    descriptor, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    try:
        result = subprocess.run(
            [compiler, *FLAGS, *flags, "-o", unfinished, str(source)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        if result.returncode:
            raise NativeCodeError(f"{compiler} cannot compile {source}: {result.stderr.strip()[:2000]}")
        os.rename(unfinished, library)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
