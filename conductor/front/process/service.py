"""The process of a front on a node with `--role front`: `python -m conductor.front.process.service`.

Owns: the front's connection to the Conductor. Does not know: instances, context caches (which only the front
in the Conductor's process keeps).
"""

import contextlib

import uvloop
from prometheus_client import CollectorRegistry

from conductor.front.generation.link import FromConductor
from conductor.front.http.server import listen
from conductor.front.process.server import serve as serve_front
from conductor.front.process.starting import announce, front_config, front_drain, open_model
from conductor.telemetry.leadership_metrics import register_reach
from mooncake.bus.zeromq import peer_identity
from mooncake.leadership.conductor_dealer import ConductorDealer
from mooncake.leadership.leaders import following
from mooncake.node.process import Ready, child_main
from mooncake.node.process_config import FrontProcess
from mooncake.tracing.opening import open_tracer

_LAST_WORDS_S = 1.0  # to send the Conductor the cancellations of requests


async def serve(process: FrontProcess) -> None:
    """Run the front: listen, load the model's tokenizer and limits, and serve until cancelled."""
    config, key = process.config, process.cluster_key
    tracer = open_tracer(config.tracing, process.name)
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(listen(config.http.host, config.http.port)))
        leaders = await stack.enter_async_context(following(config.cluster, config.conductor))
        model = await open_model(config)
        identity = peer_identity(process.name, process.incarnation)
        conductor: ConductorDealer[FromConductor] = ConductorDealer(leaders, identity, FromConductor, key)
        try:
            registry = CollectorRegistry()
            if config.cluster.has_standbys:
                register_reach(registry, leaders.reach)
            await serve_front(
                front_config(config, model.name, key),
                model.served,
                conductor,
                registry,
                listener,
                lambda url: announce(Ready(url)),
                tracer=tracer,
                drain=front_drain(config),
            )
        finally:
            conductor.close(linger_s=_LAST_WORDS_S)


if __name__ == "__main__":
    child_main(FrontProcess, serve, lambda _: uvloop.new_event_loop())
