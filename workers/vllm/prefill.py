"""Prompts that vLLM computes for a decode instance. vLLM stores their blocks, and the messenger sends them.

Owns: the order of events of one prefill. Does not know: how requests are placed, how vLLM computes.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from mooncake.errors import PoolError, PoolFullError, RequestError, TransferError
from mooncake.messages.blocks import BlockKey
from mooncake.messages.pools import COMPUTED, Tier
from mooncake.messages.workers import Prefill, Prefilled
from workers.errors import AnswerLostError
from workers.vllm.attempts import Attempts

_STORE_S = 5.0
"""Seconds from the first token of a prompt until its blocks must be in the pool."""
_POLL_S = 0.005


class VllmPrefill:
    """The prefill runner of a vLLM instance.

    The runner answers each `Prefill` order with `Prefilled` or `WorkFailed`.
    """

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._server, self._pool, self._send = attempts.server, attempts.pool, attempts.send
        self.num_prompts = 0
        """The number of prompts at this instance, whether they are computed or wait."""
        self.num_tokens: Counter[str] = Counter()
        """Prompt tokens of finished prefills by source (`PREFILL_SOURCES`)."""
        self.seconds = 0.0
        """The sum of the seconds that each prompt was in the engine."""

    def start(self, order: Prefill) -> None:
        """Begin the prefill of an order as a task."""
        self._attempts.start(order, lambda: self._serve(order))

    async def _serve(self, order: Prefill) -> None:
        self.num_prompts += 1
        try:
            await self._prefill(order)
        finally:
            self.num_prompts -= 1

    async def _prefill(self, order: Prefill) -> None:
        ref, request, grant = order.ref, order.request, order.grant
        if any(page.block_index >= len(request.block_keys) for page in grant.pages):
            raise RequestError(
                "vLLM stores full blocks only, and the decode instance expects the last one too"
            )
        await self._fetch(order)
        num_on_device = self._server.kv_events.blocks.num_leading_tokens(request.block_keys)
        began_s = asyncio.get_running_loop().time()
        outputs = [output async for output in self._server.complete(request, request.token_ids, 1)]
        if not outputs or not outputs[0].token_ids:
            raise AnswerLostError("vLLM ended a prompt without a token")
        self.seconds += asyncio.get_running_loop().time() - began_s
        first_token, num_cached_tokens = outputs[0].token_ids[0], outputs[-1].num_cached_tokens
        num_on_device = min(num_on_device, num_cached_tokens)
        self.num_tokens[Tier.DEVICE.value] += num_on_device
        self.num_tokens[Tier.DRAM.value] += num_cached_tokens - num_on_device
        self.num_tokens[COMPUTED] += len(request.token_ids) - num_cached_tokens
        reservation_id = await self._stored(order)
        try:
            await self._pool.send(reservation_id, grant, ref.request_id)
            await self._send(Prefilled(ref, first_token, num_cached_tokens))
            await self._pool.wait_sent(reservation_id)
        finally:
            await self._pool.release(reservation_id)

    async def _fetch(self, order: Prefill) -> None:
        """Fetch the prefix that the order's prefix source has. vLLM computes blocks that do not arrive."""
        source = order.prefix_source
        if source is None:
            return
        try:
            reservation = await self._pool.reserve(
                order.request.block_keys[: source.num_blocks], 0, order.request.tenant
            )
        except PoolFullError:
            return
        try:
            lacking = [index for index, block in enumerate(reservation.blocks) if not block.sealed]
            if lacking:
                await self._pool.fetch(reservation.reservation_id, source.shards, lacking, lambda *_: None)
        finally:
            await self._pool.release(reservation.reservation_id)

    async def _stored(self, order: Prefill) -> int:
        """Wait until vLLM has stored the prompt's blocks, reserve them, and return the reservation's id.

        Raises TransferError if vLLM has not stored the blocks in time, for example because the pool has no
        room; PoolError if blocks were evicted meanwhile.
        """
        keys = order.request.block_keys
        try:
            async with asyncio.timeout(_STORE_S):
                await self._until_stored(keys)
        except TimeoutError:
            raise TransferError(f"vLLM has not stored {len(keys)} blocks within {_STORE_S:g} s") from None
        reservation = await self._pool.reserve(keys, 0, order.request.tenant)
        if not all(block.sealed for block in reservation.blocks):
            await self._pool.release(reservation.reservation_id)
            raise PoolError("blocks of the prompt were evicted before they were sent")
        return reservation.reservation_id

    async def _until_stored(self, keys: Sequence[BlockKey]) -> None:
        while True:
            if await self._pool.has_all(keys):
                return
            await asyncio.sleep(_POLL_S)
