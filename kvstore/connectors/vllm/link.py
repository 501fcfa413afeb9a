"""An engine's link to its pools, which may start after the engine, end, and come back.

Owns: the connection; the facts on which both sides must agree. Does not know: calls to the pools.
"""

import logging
import threading

from kvstore.client.client import KVCachePool
from kvstore.connectors.vllm.engine_kv import EngineKV, check_layout
from kvstore.connectors.vllm.settings import ConnectorSettings
from mooncake.errors import MismatchError, MooncakeError, PoolError

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 32
_ANSWER_TIMEOUT_S = 2.0
"""Seconds that a pool may take for each answer to an engine."""
_RETRY_S = 1.0
_ADVICE = "give each model its own pool"


class PoolLink:
    """A client of the pools, made when a pool answers. The owner must call `close`.

    If no pool answers, the link retries and raises no error. If a pool that answers later does not fit the
    engine, the reason is logged, and no pool is used.
    """

    def __init__(self, settings: ConnectorSettings, engine: EngineKV, *, speaks: bool) -> None:
        """Connect, or begin to retry. Raises ConfigError or MismatchError if the pools do not fit the engine.

        `speaks`: whether this side of the connector logs warnings for the user.
        """
        self._settings, self._engine = settings, engine
        self._level = logging.WARNING if speaks else logging.DEBUG
        self.pool: KVCachePool | None = None
        """The client; None until a pool has answered. Later a lost pool counts as empty."""
        self._is_ended = threading.Event()
        if settings.block_size is not None:
            engine.check_block_size(settings.block_size)
        try:
            self._join()
        except PoolError as error:
            log.log(self._level, "serving without the KVCache pool until it is there: %s", error)
            threading.Thread(target=self._keep_trying, name="mooncake-join", daemon=True).start()

    def close(self) -> None:
        self._is_ended.set()
        if self.pool is not None:
            self.pool.close()

    def _keep_trying(self) -> None:
        while not self._is_ended.wait(_RETRY_S):
            try:
                self._join()
            except PoolError:
                continue
            except MooncakeError as error:
                log.log(max(self._level, logging.INFO), "the KVCache pool is not used: %s", error)
            else:
                log.log(
                    self._level, "the KVCache pool at %s is used from now on", self._settings.addresses[0]
                )
            return

    def _join(self) -> None:
        """Connect to the pools.

        Raises PoolError if no pool answers, ConfigError or MismatchError if a pool does not fit.
        """
        try:
            pool = self._connect(None)
        except PoolError:
            # No pool answers, or the pool has no format yet, and is formatted for our blocks.
            pool = self._connect(self._settings.block_size or DEFAULT_BLOCK_SIZE)
        try:
            self._check(pool)
        except MooncakeError:
            pool.close()
            raise
        self.pool = pool

    def _connect(self, block_size: int | None) -> KVCachePool:
        layout = None if block_size is None else self._engine.layout(block_size)
        fingerprint = None if block_size is None else self._engine.fingerprint(block_size)
        return KVCachePool.connect(
            *self._settings.addresses,
            fingerprint=fingerprint,
            layout=layout,
            timeout_s=_ANSWER_TIMEOUT_S,
            key_file=self._settings.key_file,
            formats_anew=True,
        )

    def _check(self, pool: KVCachePool) -> None:
        wanted, found = self._settings.block_size, pool.layout.block_size
        if wanted is not None and wanted != found:
            raise MismatchError("block size", wanted, found, "leave block_size out to take the pool's")
        self._engine.check_block_size(found)
        check_layout(self._engine.layout(found), pool.layout, _ADVICE)
        if pool.fingerprint != (ours := self._engine.fingerprint(found)):
            raise MismatchError("model fingerprint", ours, pool.fingerprint, _ADVICE)
