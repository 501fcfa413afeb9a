"""The opening of a process's tracer, where tracing is configured.

Owns: when the SDK is imported. Does not know: the SDK.
"""

from typing import TYPE_CHECKING

from mooncake.config.sections import TracingConfig
from mooncake.errors import ConfigError

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer


def open_tracer(config: TracingConfig, instance: str) -> "Tracer | None":
    """Return the tracer of the process `instance`; None without a configured collector.

    Raises ConfigError if the SDK is not installed.
    """
    if config.otlp_endpoint is None:
        return None
    try:
        from mooncake.tracing.tracer import Tracer
    except ImportError as missing:
        raise ConfigError(
            f"tracing.otlp_endpoint needs OpenTelemetry's SDK ({missing}):"
            " pip install --editable '.[tracing]', or leave the key out"
        ) from None
    return Tracer(config.otlp_endpoint, config.sample_ratio, instance)
