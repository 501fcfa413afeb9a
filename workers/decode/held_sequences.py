"""What a rank holds of sequences that the first rank of its group decodes: their KVCache of its own heads.

Owns: their pages in this rank's pool, and what is saved of them in the host's memory. Does not know: the
batch, which page of the device is whose.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvstore.client.worker_client import WorkerClient
from kvstore.protocol.answers import Reservation
from mooncake.errors import MooncakeError, PoolError, PoolFullError, TransferError
from mooncake.messages.blocks import BlockKey
from workers.decode.block_transfers import BlockPair, BlockTransfers
from workers.decode.sealing import Sealer
from workers.execution.jobs import is_cancelled, see_out
from workers.groups.rank_messages import (
    Answer,
    AwaitArrival,
    Done,
    Failed,
    FailureKind,
    Held,
    Hold,
    Keep,
    LetGo,
    Load,
    Restore,
    Save,
    Work,
)
from workers.kvcache.reserving import reserve_prompt


@dataclass(slots=True)
class _Sequence:
    reservation: Reservation | None = None
    keys: Sequence[BlockKey] = ()
    saved: list[torch.Tensor] = field(default_factory=list)


class HeldSequences:
    """Does the leader's calls, each as a task of `group`, and answers them. `transfers` are its own."""

    def __init__(
        self,
        pool: WorkerClient,
        transfers: BlockTransfers,
        answer: Callable[[Answer], Awaitable[None]],
        group: asyncio.TaskGroup,
    ) -> None:
        self._pool, self._transfers = pool, transfers
        self._answer, self._group = answer, group
        self._sealer = Sealer(pool, transfers)
        self._sequences: dict[int, _Sequence] = {}
        self._calls: dict[int, asyncio.Task[Held | None]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether anything is held, or being done."""
        return bool(self._sequences or self._calls)

    def start(self, call_id: int, work: Work) -> None:
        """The answer comes later."""
        self._calls[call_id] = doing = asyncio.create_task(self._perform(work))
        self._group.create_task(self._see_done(call_id, doing))

    def stop(self, call_id: int) -> None:
        """It is not wanted any more, if it has not been answered."""
        doing = self._calls.get(call_id)
        if doing is not None:
            doing.cancel()

    def close(self) -> None:
        """After this nothing can be called."""
        self._transfers.close()

    async def _see_done(self, call_id: int, doing: asyncio.Task[Held | None]) -> None:
        answer: Answer
        try:
            answer = Done(call_id, await see_out(doing, on_cancel=doing.cancel))
        except asyncio.CancelledError:
            if not doing.cancelled() or is_cancelled():
                raise
            answer = Failed(call_id, FailureKind.STOPPED, "")
        except PoolFullError as error:
            answer = Failed(call_id, FailureKind.POOL_FULL, str(error))
        except TransferError as error:
            answer = Failed(call_id, FailureKind.TRANSFER, str(error))
        except MooncakeError as error:
            answer = Failed(call_id, FailureKind.POOL, str(error))
        finally:
            del self._calls[call_id]
        await self._answer(answer)

    async def _perform(self, work: Work) -> Held | None:
        sequence = self._sequences.setdefault(work.number, _Sequence())
        match work:
            case Hold():
                return await self._hold(sequence, work)
            case AwaitArrival():
                await self._pool.wait_arrived(_reserved(sequence).reservation_id)
            case Load(pages=pages):
                await self._load(sequence, pages)
            case Keep():
                await self._keep(sequence, work)
            case Save(pages=pages):
                sequence.saved = await self._transfers.save(pages)
            case Restore(pages=pages):
                await self._transfers.restore(pages, sequence.saved)
                sequence.saved = []
            case LetGo(number=number):
                if sequence.reservation is not None:
                    await self._pool.release(sequence.reservation.reservation_id)
                self._sequences.pop(number, None)  # only now: if it is stopped, it is called again
        return None

    async def _hold(self, sequence: _Sequence, hold: Hold) -> Held:
        block_size = self._pool.segment.layout.block_size
        reservation = await reserve_prompt(self._pool, hold.request, block_size)
        sequence.reservation, sequence.keys = reservation, hold.request.block_keys
        grant = await self._pool.grant(reservation.reservation_id)
        found = itertools.takewhile(lambda block: block.sealed, reservation.blocks)
        return Held(len(list(found)), grant)

    async def _load(self, sequence: _Sequence, pages: list[int]) -> None:
        blocks = _reserved(sequence).blocks[: len(pages)]
        damaged = await self._transfers.load(
            [BlockPair(page, block.page) for page, block in zip(pages, blocks, strict=True)]
        )
        if damaged:
            keyed = zip(sequence.keys, blocks, strict=False)
            await self._pool.verify([key for key, block in keyed if block.page in damaged])
            raise PoolError(f"{len(damaged)} blocks were damaged in the pool and have been dropped")

    async def _keep(self, sequence: _Sequence, keep: Keep) -> None:
        if not keep.keys and not keep.num_private:
            return
        reservation = await self._sealer.store(keep.keys, keep.num_private, keep.pages, keep.tokens)
        if keep.is_parked:
            sequence.reservation, sequence.keys = reservation, keep.keys
        else:
            await self._pool.release(reservation.reservation_id)


def _reserved(sequence: _Sequence) -> Reservation:
    if sequence.reservation is None:
        raise PoolError("the sequence has no pages in this rank's pool")
    return sequence.reservation
