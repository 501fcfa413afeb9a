"""The state that routes share: the link to the cluster, the model, the reader of bodies, metrics, caches.

Owns: which context cache a request finds, whether the cluster can serve. Does not know: paths, answers.
"""

import asyncio
from typing import TYPE_CHECKING

import msgspec
from fastapi import Request
from prometheus_client import CollectorRegistry
from starlette.responses import Response

from conductor.front.access.access import KeyUse
from conductor.front.caches.beginning import Beginning
from conductor.front.caches.context_caches import CacheUse, ContextCache, ContextCaches
from conductor.front.caches.context_metrics import ContextMetrics
from conductor.front.config import FrontConfig
from conductor.front.errors import UnavailableError
from conductor.front.generation.generation import Generation
from conductor.front.generation.http_span import HttpSpan
from conductor.front.generation.link import ConductorPeer, Link
from conductor.front.generation.recording import Recorder
from conductor.front.generation.request_log import RequestLog
from conductor.front.http.boundary import read_body
from conductor.front.http.disconnects import while_connected
from conductor.front.http.draining import FrontDrain
from conductor.front.metrics import Metrics
from conductor.front.openai.body import ReceivedBody
from conductor.front.openai.model import ServedModel
from conductor.front.requests.reading import Reading
from conductor.front.requests.tokenization import AboutTokens
from conductor.front.requests.validation import ApiEndpoint, Job, fit_into_pool
from conductor.telemetry.display import Display
from mooncake.errors import RequestError
from mooncake.messages.fronts import ClusterState
from mooncake.messages.workers import Role
from mooncake.security.api_keys import ApiKey

if TYPE_CHECKING:
    from mooncake.tracing.tracer import Tracer


class FrontState:
    """The state that the routes of a front share. Needs a running event loop."""

    def __init__(
        self,
        config: FrontConfig,
        model: ServedModel,
        conductor: ConductorPeer,
        registry: CollectorRegistry,
        caches: ContextCaches | None = None,
        display: Display | None = None,
        tracer: "Tracer | None" = None,
        drain: FrontDrain | None = None,
    ) -> None:
        """Open the link, and fork the first process of `reading`.

        `caches` is None for a front that makes no context caches, `display` if the Conductor is in another
        process, `drain` for a front that is never drained. Raises ConfigError for an endpoint or a trace file
        that cannot be used.
        """
        self.config, self.model = config, model
        self.registry, self.display, self.tracer = registry, display, tracer
        self.drain = drain or FrontDrain()
        self.metrics = Metrics(registry, config.served_model_name, config.ttft_slo_s, config.tbt_slo_s)
        self.request_log = RequestLog(None if display is None else display.pair)
        now = asyncio.get_running_loop().time
        self._caches = caches
        if caches is not None:
            ContextMetrics(caches, registry, now)
        self.link = Link(
            conductor,
            config.reply_endpoint,
            config.cluster_key,
            model.fingerprint,
            model.block_size,
            config.absence_timeout_s,
            self.metrics.output_dropped,
            lambda: [] if caches is None else caches.kept(now()),
            config.reply_listen_endpoint,
        )
        self.reading = Reading(
            model, config.served_model_name, config.max_choices, lambda: self.link.is_ahead_of_conductor
        )
        self.recorder = None if config.record is None else Recorder(config.record, config.record_bytes)

    def close(self) -> None:
        """Stop the processes and the thread of the front, and finish the trace file."""
        self.reading.close()
        if self.recorder is not None:
            self.recorder.close()

    @property
    def caches(self) -> ContextCaches:
        """The context caches. Raises RequestError if this front makes none."""
        if self._caches is None:
            raise RequestError(
                "context caches are known to the conductor's own front alone, and this is another one",
                status=501,
                code="context_caches_elsewhere",
            )
        return self._caches

    def cluster(self) -> ClusterState:
        """Return the cluster's state. Raises UnavailableError if the state is unknown."""
        cluster = self.link.cluster
        if cluster is None:
            raise UnavailableError("not ready: the conductor does not answer")
        return cluster

    def ready_cluster(self) -> ClusterState:
        """Return the cluster's state.

        Raises UnavailableError if this front drains, or if the cluster cannot serve, as instances for prefill
        or for decode are missing.
        """
        self.drain.check()
        cluster = self.cluster()
        missing = [
            f"all {role.value} instances are draining"
            if cluster.num_draining.get(role)
            else f"no {role.value} instance has registered"
            for role, num in ((Role.PREFILL, cluster.num_prefill), (Role.DECODE, cluster.num_decode))
            if num == 0
        ]
        if missing:
            raise UnavailableError(f"not ready: {' and '.join(missing)}")
        return cluster

    async def read_body(self, request: Request) -> ReceivedBody:
        """Return the body of a request.

        Raises UnavailableError if this front drains, RequestError if the body is too large, ClientDisconnect
        if the client hangs up.
        """
        self.drain.check()
        return await read_body(request, self.config.max_request_bytes)

    async def read_job(self, endpoint: ApiEndpoint, body: ReceivedBody, key: ApiKey | None) -> Job:
        """Return the job in `body`, checked to fit the cluster's instances. Raises RequestError.

        Whether there are instances for the job now is decided by the Conductor later, as a lost instance may
        come back.
        """
        now_s = asyncio.get_running_loop().time()
        found: list[ContextCache] = []

        def find_cache(name: str) -> Beginning:
            found.append(self.caches.find(key, name, now_s, param="context_cache"))
            return found[-1].beginning

        job = await self.reading.job(endpoint, body, key, find_cache)
        if found:
            job = msgspec.structs.replace(job, cache_use=CacheUse(found[-1], job.num_shared))
        return fit_into_pool(job, self.cluster(), self.model.block_size)

    def generation(self, job: Job, arrived_s: float, span: HttpSpan | None = None) -> Generation:
        """Return the generation of a job.

        Args:
            job: The job.
            arrived_s: The event loop's time at which the job's HTTP request arrived.
            span: The span of the HTTP request; None if the HTTP request has none.
        """
        return Generation(
            job, self.model, self.link, self.metrics, self.request_log, self.recorder, arrived_s, span
        )

    async def about_tokens(self, kind: AboutTokens, request: Request) -> Response:
        """Return the answer to a request about tokens. Raises RequestError, or ClientDisconnect."""
        with while_connected(request):
            body = await self.read_body(request)
            answer = await self.reading.about_tokens(kind, body, key_of(request))
        return Response(answer, media_type="application/json")


def key_of(request: Request) -> ApiKey | None:
    """Return the client's API key; None if clients need none."""
    use: KeyUse | None = request.scope["state"].get("key_use")
    return None if use is None else use.key


def claimed(request: Request, job: Job) -> Job:
    """Return the job with its quota claim, after counting its choices against the limits of the client's key.

    Raises RequestError.
    """
    use: KeyUse | None = request.scope["state"].get("key_use")
    if use is None:
        return job
    use.take(len(job.sampling))
    return msgspec.structs.replace(job, claim=use.claim(job.num_prompt_tokens))
