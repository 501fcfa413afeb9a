"""The first word of a worker whose life before this one has ended: in whose pass that was.

It is said before the model is loaded, so that the Conductor knows soon whether a request is to blame.

Owns: this word. Does not know: what follows from it.
"""

import asyncio
import contextlib
import logging

from mooncake.errors import ConfigError
from mooncake.messages.bus import Dealer, PeerGoneError, peer_identity
from mooncake.messages.requests import Ref
from mooncake.messages.workers import Returning, ReturnNoted, ToWorker
from mooncake.node.lives import ProcessEnd
from mooncake.node.process_config import WorkerProcess

PATIENCE_S = 10.0
"""for a Conductor that does not answer: what it has lost by then nobody can blame on anybody"""
log = logging.getLogger(__name__)


async def say_returning(process: WorkerProcess, left: list[Ref] | None) -> None:
    """Return when the Conductor has heard it, or does not answer. `left`: whose pass the life before left."""
    if process.previous_end is None:
        return
    failed_in = left if process.previous_end is ProcessEnd.FAILED else []
    identity = peer_identity(f"{process.part}/returning", process.incarnation)
    try:
        conductor: Dealer[ToWorker] = Dealer(
            process.config.conductor.endpoint, identity, ToWorker, process.cluster_key
        )
        with contextlib.closing(conductor):
            async with asyncio.timeout(PATIENCE_S):
                await conductor.send(Returning(process.instance, process.incarnation, failed_in))
                while not isinstance(await conductor.recv(), ReturnNoted):
                    pass
    except (TimeoutError, PeerGoneError, ConfigError) as error:
        log.info("the conductor does not hear how the life before has ended: %s", error or "no answer")
