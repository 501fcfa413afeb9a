"""vLLM on the KVCache pool: `MooncakeServeConnector`, which `vllm serve --kv-transfer-config` names.

torch and vLLM are loaded only when the connector is asked for.
"""

from importlib import metadata
from typing import TYPE_CHECKING

from mooncake.errors import MismatchError

if TYPE_CHECKING:
    from kvstore.connectors.vllm.connector import MooncakeServeConnector

__all__ = ["MooncakeServeConnector"]

VERSION = "0.32"
"""The version of vLLM that the connector is made for."""


def check_version(found: str | None = None) -> None:
    """Check that `found`, by default the installed version of vLLM, is supported. Raises MismatchError."""
    if found is None:
        try:
            found = metadata.version("vllm")
        except metadata.PackageNotFoundError:
            found = "none"
    if found.split("+")[0].split(".")[:2] != VERSION.split("."):
        raise MismatchError(
            "version of vLLM",
            f"{VERSION}.*",
            found,
            f"its connectors change with every release; install vllm=={VERSION}.*, or the release of"
            " mooncake-serve that names yours",
        )


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    from kvstore.connectors.vllm.connector import MooncakeServeConnector

    return MooncakeServeConnector
