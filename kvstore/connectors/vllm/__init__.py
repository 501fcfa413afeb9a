"""vLLM on the KVCache pool: `MooncakeServeConnector`, which `vllm serve --kv-transfer-config` names.

torch and vLLM are loaded only when the connector is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.connectors.vllm.connector import MooncakeServeConnector

__all__ = ["MooncakeServeConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstore.connectors.vllm.version import check_version

    check_version()
    from kvstore.connectors.vllm.connector import MooncakeServeConnector

    return MooncakeServeConnector
