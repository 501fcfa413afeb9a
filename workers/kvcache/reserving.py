"""The reservation of a prompt's pool pages, for prefill and decode alike.

Owns: the wait for room. Does not know: the computation.
"""

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from mooncake.errors import PoolFullError
from mooncake.messages.requests import Request


async def reserve_prompt(pool: WorkerClient, request: Request, block_size: int) -> Reservation:
    """Reserve pool pages for a prompt: the pages of blocks that the pool has, and fresh ones for the others.

    Waits while the pool is full. Nothing stays reserved if the call is cancelled or raises.
    """
    num_private = 1 if len(request.token_ids) % block_size else 0
    reservation = await _reserve(pool, request, num_private)
    if pool.wants_token_ids and not request.is_salted:
        try:
            await pool.describe_tokens(reservation.reservation_id, request.token_ids)
        except BaseException:
            await pool.release(reservation.reservation_id)
            raise
    return reservation


async def _reserve(pool: WorkerClient, request: Request, num_private: int) -> Reservation:
    while True:
        try:
            return await pool.reserve(request.block_keys, num_private, request.tenant)
        except PoolFullError as full:
            await pool.wait_for_space(full)
