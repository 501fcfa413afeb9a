"""The import of pyverbs, which is part of rdma-core and not of PyPI's usual packages.

Debian and Ubuntu install pyverbs for their own Python 3 (package python3-pyverbs). A virtual environment of
the same Python version does not have pyverbs on its path. There pyverbs is imported from `SYSTEM_PACKAGES`.

Owns: the import of pyverbs. Does not know: devices.
"""

import functools
import importlib
import importlib.machinery
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from messenger.rdma.errors import RdmaUnavailableError

SYSTEM_PACKAGES: Final = Path("/usr/lib/python3/dist-packages")


@dataclass(frozen=True, slots=True)
class Verbs:
    """The modules of pyverbs, which have no types."""

    addr: Any
    cq: Any
    device: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    Error: type[Exception]


@functools.cache
def load_verbs() -> Verbs:
    """Return the modules of pyverbs. Raises RdmaUnavailableError if they cannot be imported."""
    try:
        return _import()
    except ImportError as error:
        reason = error
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]  # binary modules of exactly this Python
    if not (SYSTEM_PACKAGES / "pyverbs" / f"device{suffix}").exists():
        raise RdmaUnavailableError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} has no pyverbs ({reason});"
            " install python3-pyverbs and use the Python version of that distribution"
        )
    sys.path.append(str(SYSTEM_PACKAGES))
    try:
        return _import()
    except ImportError as error:
        raise RdmaUnavailableError(
            f"pyverbs in {SYSTEM_PACKAGES} cannot be imported ({error}); reinstall python3-pyverbs"
        ) from error
    finally:
        sys.path.remove(str(SYSTEM_PACKAGES))


def _import() -> Verbs:
    names = ("addr", "cq", "device", "mr", "pd", "qp", "wr")
    modules = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
    error: type[Exception] = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    return Verbs(Error=error, **modules)
