"""The Conductor's process: `python -m conductor.process.service`, started by the supervisor.

The process receives and sends the messages of the pure policy (`conductor.policy`). It also contains a front.

Owns: the control socket, the clock, the epoch, when KV events are followed. Does not know: why messages are
sent, the meaning of events.
"""

import asyncio
import contextlib
import json
import logging
import shlex
import time
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from conductor.effects import Effect, ToConductor
from conductor.front.caches.cache_file import SCHEMA as CACHES
from conductor.front.caches.cache_file import CacheFile
from conductor.front.caches.cache_keys import CacheKeys
from conductor.front.caches.cache_store import CacheStore
from conductor.front.config import FrontConfig
from conductor.front.http.server import listen
from conductor.front.openai.model import ServedModel
from conductor.front.process.server import serve as serve_front
from conductor.front.process.starting import (
    OpenedModel,
    announce,
    front_config,
    front_drain,
    open_model,
)
from conductor.policy import Conductor
from conductor.process.event_follower import EventFollower
from conductor.process.quota_levels import SCHEMA as LEVELS
from conductor.process.quota_levels import LevelFile, LevelKeys, LevelStore, QuotaLevels
from conductor.process.standby import leading
from conductor.settings import Limits, PolicySettings, ReplicationSettings, SLOs
from conductor.telemetry.display import Display
from conductor.telemetry.history import History
from conductor.telemetry.metrics import ConductorMetrics, HistoryMetrics
from conductor.telemetry.request_spans import RequestSpans
from mooncake.bus.in_process import Inbox, InProcessLink
from mooncake.bus.zeromq import PeerGoneError, Router, peer_identity
from mooncake.config.conductor_section import ConductorConfig
from mooncake.config.profile import load_profile_of
from mooncake.endpoints import advertised
from mooncake.leadership.etcd import Etcd
from mooncake.leadership.leaders import Fit
from mooncake.leadership.state_keys import StateKeys
from mooncake.leadership.terms import LeadershipLostError, Term
from mooncake.messages.fronts import FromFront
from mooncake.messages.workers import SPOKEN
from mooncake.node.process import Ready, child_main
from mooncake.node.process_config import ConductorProcess
from mooncake.node.state_file import StateFile
from mooncake.tracing.opening import open_tracer

TICK_S = 0.5
OWN_FRONT = peer_identity("front", 0)
"""The identity of the front in this process. The identities of other fronts have the names of their nodes."""
_OWN_FRONT_S = 0.005
"""The most seconds that one turn of the event loop spends on messages of the front in this process."""
log = logging.getLogger(__name__)


class ConductorService:
    """The loop of the Conductor's process: receive, decide, send."""

    def __init__(
        self,
        conductor: Conductor,
        router: Router[ToConductor],
        front: InProcessLink[Any, FromFront],
        follower: EventFollower,
        history: History,
        term: Term,
        spans: RequestSpans | None = None,
    ) -> None:
        """Prepare the loop.

        `router` connects to workers and to fronts in other processes, `front` to the front in this process.
        `spans` records the spans of requests; None if requests are not traced.
        """
        self._conductor = conductor
        self._router, self._front = router, front
        self._follower = follower
        self._history, self._term, self._spans = history, term, spans
        self._num_changes_followed = 0

    async def run(self) -> None:
        """Receive and handle messages until cancelled.

        Raises LeadershipLostError, in an ExceptionGroup, at the end of the term.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._term.end())
            group.create_task(self._tick())
            group.create_task(self._follower.run())
            group.create_task(self._hear_own_front())
            while True:
                await self._react(*await self._router.recv())

    async def _hear_own_front(self) -> None:
        turn_began_s = time.monotonic()
        while True:
            await self._react(OWN_FRONT, await self._front.recv())
            if not self._front.num_unread or time.monotonic() > turn_began_s + _OWN_FRONT_S:
                await asyncio.sleep(0)  # many requests at once must not starve the event loop
                turn_began_s = time.monotonic()

    async def _react(self, sender: bytes, message: ToConductor) -> None:
        now_s = time.monotonic()
        if self._spans is not None:
            message = self._spans.enter(message, now_s)
        effects = self._conductor.handle(sender, message, now_s)
        self._observe(sender, message, effects, now_s)
        await self._carry_out(effects)

    def _observe(
        self, sender: bytes, message: ToConductor | None, effects: list[Effect], now_s: float
    ) -> None:
        if self._spans is not None:
            self._spans.observe(effects, time.monotonic())
        self._history.observe(sender, message, effects, now_s)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            effects = self._conductor.tick(now_s)
            self._observe(b"", None, effects, now_s)
            self._history.changes.observe(self._conductor.instances, now_s)
            await self._carry_out(effects)

    async def _carry_out(self, effects: list[Effect]) -> None:
        """Send the effects. If a peer turns out to be gone, send the effects of its loss, too."""
        self._follow()
        pending = list(effects)
        while pending:
            effect = pending.pop(0)
            if effect.peer == OWN_FRONT:
                await self._front.send(effect.message)
                continue
            try:
                await self._router.send(effect.peer, effect.message)
            except PeerGoneError as error:
                now_s = time.monotonic()
                consequences = self._conductor.peer_gone(effect.peer, now_s)
                self._observe(b"", None, consequences, now_s)
                log.log(logging.WARNING if consequences else logging.DEBUG, "%s", error)
                self._follow()
                pending += consequences

    def _follow(self) -> None:
        """Follow the KV events of the registered instances, if the instances have changed.

        The caller must not await anything between the change and this call, so that no life is missed.
        """
        if self._num_changes_followed != self._conductor.instances.num_changes:
            self._num_changes_followed = self._conductor.instances.num_changes
            self._follower.follow(self._conductor.instances)


async def serve(process: ConductorProcess) -> None:
    """Run the Conductor: open the model's description, wait for leadership, and serve.

    Returns when leadership is lost.
    """
    try:
        await _serve(process)
    except* LeadershipLostError:
        log.warning("etcd has not heard this conductor in time: it starts again, as a standby")


async def _serve(process: ConductorProcess) -> None:
    """Wait until this process leads, then serve.

    Raises LeadershipLostError, in an ExceptionGroup, when leadership is lost.
    """
    config = process.config
    tracer = open_tracer(config.tracing, "conductor")
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(listen(config.http.host, config.http.port)))
        model = await open_model(config)
        front = front_config(config, model.name, process.cluster_key)
        router: Router[ToConductor] = Router(config.conductor.listens_at, ToConductor, process.cluster_key)
        stack.callback(router.close)
        endpoint = advertised(config.conductor.endpoint, router.endpoint)
        cache_store, level_store = await stack.enter_async_context(_stores(process))
        registry = CollectorRegistry()
        fit = Fit(SPOKEN, model.served.fingerprint, process.cluster_key.key_id)
        term = await stack.enter_async_context(
            leading(config.cluster, process.epoch, front, endpoint, fit, listener, registry)
        )
        conductor = _new_conductor(config.conductor, config.worker.mixed_chunk_tokens, model, term.epoch)
        from_front, to_front = Inbox[FromFront](), Inbox[Any]()
        own_front = InProcessLink(to_front, from_front)
        follower = EventFollower(conductor.prefixes, process.cluster_key)
        stack.callback(follower.close)
        history, spans = History(), None
        if tracer is not None:
            spans = RequestSpans(tracer, conductor, config.conductor.scheduling)
            history.on_end = spans.ended
        ConductorMetrics(
            conductor,
            registry,
            time.monotonic,
            lambda: router.num_refused,
            lambda: router.num_unfinished,
            lambda: follower.streams,
        )
        HistoryMetrics(history, registry)
        levels = QuotaLevels(level_store, conductor.quotas)
        display = Display(conductor, history, front.served_model_name, time.time() - time.monotonic())
        async with asyncio.TaskGroup() as group:
            service = ConductorService(conductor, router, own_front, follower, history, term, spans)
            group.create_task(service.run())
            group.create_task(levels.run())
            await serve_front(
                front,
                model.served,
                InProcessLink(from_front, to_front),
                registry,
                listener,
                lambda url: announce(_ready(url, front, model.served, config.role == "all")),
                display,
                cache_store,
                tracer,
                front_drain(config),
            )


@contextlib.asynccontextmanager
async def _stores(process: ConductorProcess) -> AsyncIterator[tuple[CacheStore, LevelStore]]:
    """Open the stores of context caches and of quota levels.

    The stores are in etcd if the cluster has standbys, else in a file of this host.
    """
    cluster = process.config.cluster
    if cluster.has_standbys:
        async with Etcd(cluster) as etcd, asyncio.TaskGroup() as group:
            keys = StateKeys(etcd, cluster, process.epoch)
            caches = CacheKeys(keys)
            tidying = group.create_task(caches.run())
            yield caches, LevelKeys(keys)
            tidying.cancel()
    else:
        state = await asyncio.to_thread(StateFile, process.state_file, (CACHES, LEVELS))
        with contextlib.closing(state):
            yield CacheFile(state), LevelFile(state)


def _new_conductor(
    config: ConductorConfig, mixed_chunk_tokens: int, model: OpenedModel, epoch: int
) -> Conductor:
    limits = Limits(
        max_running_requests=config.max_running_requests,
        peer_timeout_s=config.peer_timeout_s,
        placement_timeout_s=config.placement_timeout_s,
        switch_timeout_s=config.switch_timeout_s,
        ttft_slo_s=config.ttft_slo_s,
        tbt_slo_s=config.tbt_slo_s,
        slo_classes={
            name: SLOs(promised.ttft_slo_s, promised.tbt_slo_s)
            for name, promised in config.slo_classes.items()
        },
        max_waiting=config.max_waiting,
    )
    threshold = config.kvcache_balancing_threshold
    settings = PolicySettings(
        config.scheduling,
        None if isinstance(threshold, str) else threshold,
        config.overload,
        replication=_replication_settings(config),
        moves_requests=config.migrate_for_slos,
        has_rebalancing=config.rebalancing,
        moves_modules=config.migrate_modules,
        has_inlining=config.inlining,
        mixed_chunk_tokens=mixed_chunk_tokens,
    )
    path = config.profile
    profile = None if path is None else load_profile_of(path, model.name, model.shape, model.dtype)
    return Conductor(
        epoch,
        model.served.fingerprint,
        limits,
        settings,
        None if profile is None else profile.costs,
        None if profile is None else profile.device,
    )


def _replication_settings(config: ConductorConfig) -> ReplicationSettings | None:
    if not config.replicate:
        return None
    return ReplicationSettings(
        config.replication_period_s, config.replication_uses, int(config.replication_bytes)
    )


def _ready(url: str, front: FrontConfig, model: ServedModel, is_whole_cluster: bool) -> Ready:
    """Return the URL of the API. If this node has the whole cluster, add a command to try the API."""
    if not is_whole_cluster:
        return Ready(url)
    text = "Name the capital of France."
    prompt: dict[str, object]
    if model.tokenizer.has_chat_template:
        path, prompt = "chat/completions", {"messages": [{"role": "user", "content": text}]}
    else:
        path, prompt = "completions", {"prompt": text}
    body = json.dumps({"model": front.served_model_name, **prompt, "temperature": 0})
    reachable = url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    headers = "-H 'Content-Type: application/json'"
    if front.api_keys_file is not None:
        headers += ' -H "Authorization: Bearer $OPENAI_API_KEY"'
    return Ready(url, f"curl -sS {reachable}/v1/{path} {headers} -d {shlex.quote(body)}")


if __name__ == "__main__":
    child_main(ConductorProcess, serve, lambda _: uvloop.new_event_loop())
