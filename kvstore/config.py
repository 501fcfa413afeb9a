"""Configuration of a messenger process, as its supervisor sends it.

Owns: names, types and bounds. Does not know: YAML.
"""

from pydantic import BaseModel, ConfigDict, Field

from messenger.transports import TransportChoice


class MessengerConfig(BaseModel):
    """`segment_fd` is inherited: allocated memory whose size is the pool's size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance: str = Field(min_length=1)
    incarnation: int = Field(ge=0)
    socket_path: str = Field(min_length=1)
    """Unix socket of the worker"""
    peer_socket_path: str = Field(min_length=1)
    """Unix socket of messengers on the same host"""
    tcp_host: str = "127.0.0.1"
    """address to listen on, and the one that other messengers are told"""
    tcp_port: int = Field(default=0, ge=0, le=65535)
    """0: any free port"""
    segment_fd: int = Field(ge=0)
    transport: TransportChoice = "auto"
    ack_timeout_s: float = Field(default=30.0, gt=0)
    connect_timeout_s: float = Field(default=5.0, gt=0)
