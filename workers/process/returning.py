"""The first message of a restarted worker: the requests in whose pass the previous process ended.

The message is sent before the model is loaded, so that the Conductor knows soon whether a request is to
blame.

Owns: this message. Does not know: its consequences.
"""

import asyncio
import contextlib
import logging

from mooncake.bus.zeromq import Dealer, PeerGoneError, peer_identity
from mooncake.errors import ConfigError
from mooncake.leadership.leaders import Leaders
from mooncake.messages.requests import Ref
from mooncake.messages.workers import Returning, ReturnNoted, ToWorker
from mooncake.node.lives import ProcessEnd
from mooncake.node.process_config import WorkerProcess

ANSWER_TIMEOUT_S = 10.0
"""Seconds for which the Conductor's answer is awaited.

A later message would come too late for the Conductor to blame a request.
"""
log = logging.getLogger(__name__)


async def say_returning(process: WorkerProcess, leaders: Leaders, left: list[Ref] | None) -> None:
    """Report the requests in whose pass the previous process failed, and wait for the Conductor's answer.

    `left` are the requests of the last pass; None if they are unknown. If the previous process was killed, no
    request is blamed. Without a previous process no message is sent.
    """
    if process.previous_end is None:
        return
    failed_in = left if process.previous_end is ProcessEnd.FAILED else []
    identity = peer_identity(f"{process.part}/returning", process.incarnation)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            leader = await leaders.known()
            conductor: Dealer[ToWorker] = Dealer(leader.endpoint, identity, ToWorker, process.cluster_key)
            with contextlib.closing(conductor):
                await conductor.send(Returning(process.instance, process.incarnation, failed_in))
                while not isinstance(await conductor.recv(), ReturnNoted):
                    pass
    except (TimeoutError, PeerGoneError, ConfigError) as error:
        log.info("the conductor does not hear how the life before has ended: %s", error or "no answer")
