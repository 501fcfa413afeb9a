"""The settings in `kv_connector_extra_config`.

Owns: the keys of these settings. Does not know: who uses a value.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvstore.client.connections import PoolURL, key_for
from mooncake.config.spelling import did_you_mean
from mooncake.errors import ConfigError

SECTION = "kv_connector_extra_config"


class ConnectorSettings(msgspec.Struct, frozen=True):
    """The connector's pools, and the block size of a pool that has no blocks yet."""

    pool: str | list[str]
    """The pools' addresses, as `KVCachePool.connect` takes them; blocks are stored in the first pool."""
    key_file: str | None = None
    """The file of the cluster key, for addresses on other hosts."""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    """Tokens of a block. By default the pool's block size, or 32 if the pool has none yet."""

    @property
    def addresses(self) -> list[str]:
        """The addresses of the pools, the first pool first."""
        return [self.pool] if isinstance(self.pool, str) else self.pool

    @classmethod
    def of(cls, given: Mapping[str, object]) -> "ConnectorSettings":
        """Return the given settings, checked. Raises ConfigError, which names the key."""
        known = cls.__struct_fields__
        for key in given:
            if key not in known:
                meant = did_you_mean(key, known)
                raise ConfigError(f"{SECTION}: unknown key {key}{meant}; known keys are {', '.join(known)}")
        if not given.get("pool"):
            raise ConfigError(f"{SECTION}: pool is missing: unix:/path/of.sock or tcp://host:port of a pool")
        try:
            settings = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(" - at `$.")
            raise ConfigError(f"{SECTION}: {place.rstrip('`')}: {reason}") from None
        try:
            key_for([PoolURL.parse(address) for address in settings.addresses], settings.key_file)
        except ConfigError as error:
            raise ConfigError(f"{SECTION}: {error}") from None
        return settings
