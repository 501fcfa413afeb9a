"""The front's configuration.

Owns: names, defaults and bounds of the values. Does not know: where they come from.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from mooncake.security.keys import ClusterKey


class FrontConfig(BaseModel):
    """The settings of a front.

    Workers connect to `reply_endpoint`. The front listens for them at `reply_listen_endpoint`, or at
    `reply_endpoint` if that is None.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes a free one")
    reply_endpoint: str
    reply_listen_endpoint: str | None = Field(default=None, description="default: reply_endpoint")
    cluster_key: ClusterKey
    served_model_name: str = Field(min_length=1)
    ttft_slo_s: float | None = Field(default=None, gt=0, description="what counts as in time; None: any")
    tbt_slo_s: float | None = Field(default=None, gt=0)
    slo_classes: dict[str, int] = Field(default={}, description="their priorities, by name")
    max_request_bytes: int = Field(default=8 << 20, ge=1)
    max_choices: int = Field(default=128, ge=1, description="most choices (prompts x n) of one HTTP request")
    api_keys_file: Path | None = None
    admin_listen: str | None = Field(default=None, description="host:port of /metrics, /dashboard, /admin")
    admin_keys_file: Path | None = None
    record: Path | None = Field(default=None, description="trace of this front's requests")
    record_bytes: int = Field(default=256 << 20, ge=1)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    context_cache_tokens: int = Field(default=1 << 17, ge=0, description="in context caches of a key")
    cors_origins: tuple[str, ...] = ()
    absence_timeout_s: float = Field(
        default=60.0,
        ge=0,
        description="how long a request goes on without tokens while there is no Conductor",
    )
    request_timeout_s: float = Field(
        default=60.0, gt=0, description="a client that needs longer to send a request is hung up on"
    )
    send_timeout_s: float = Field(
        default=60.0, gt=0, description="a client that takes nothing of its answer for so long is hung up on"
    )
