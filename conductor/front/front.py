"""What the routes share: the link to the cluster, the model, the metrics, the context caches.

Owns: when a body is read beside the streams, what the cluster must be to serve. Does not know: paths,
answers.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from prometheus_client import CollectorRegistry

from conductor.display import Display
from conductor.front.boundary import read_body
from conductor.front.config import FrontConfig
from conductor.front.context_caches import ContextCaches
from conductor.front.context_metrics import ContextMetrics
from conductor.front.errors import RETRY_AFTER_S, UnavailableError
from conductor.front.grammars import WantedGrammar
from conductor.front.link import ConductorPeer, Link
from conductor.front.metrics import Metrics
from conductor.front.model import ServedModel
from conductor.front.outbox import Outbox
from conductor.front.validation import Endpoint, Job, fit_into_pool, read_job
from mooncake.api_keys import ApiKey
from mooncake.errors import GrammarError, OverloadedError, RequestError
from mooncake.front_messages import ClusterState

# Tokenizing more than this takes long enough (milliseconds) to be felt in the streams on the same loop.
# Below it a thread is felt more: it and the loop wait for each other's lock.
_MAX_INLINE_BYTES = 8192
_MAX_WAITING_GRAMMARS = 16

T = TypeVar("T")


class Front:
    """Needs a running event loop."""

    def __init__(
        self,
        config: FrontConfig,
        model: ServedModel,
        conductor: ConductorPeer,
        registry: CollectorRegistry,
        display: Display | None = None,
    ) -> None:
        """Raises ConfigError for an endpoint that cannot be used."""
        self.config, self.model = config, model
        self.registry, self.display = registry, display
        self.outbox = Outbox()
        self.metrics = Metrics(registry, config.served_model_name, config.ttft_slo_s, config.tbt_slo_s)
        quota, now = config.context_cache_tokens, asyncio.get_running_loop().time
        self._caches = None if quota is None else ContextCaches(quota)
        if self._caches is not None:
            ContextMetrics(self._caches, registry, now)
        self.link = Link(
            conductor,
            config.reply_endpoint,
            config.cluster_key,
            model.fingerprint,
            model.block_size,
            self.metrics.output_dropped,
            lambda: [] if self._caches is None else self._caches.kept(now()),
            self.outbox,
        )

    @property
    def caches(self) -> ContextCaches:
        """Raises RequestError if this front makes none."""
        if self._caches is None:
            raise RequestError(
                "context caches are known to the conductor's own front alone, and this is another one",
                status=501,
                code="context_caches_elsewhere",
            )
        return self._caches

    def cluster(self) -> ClusterState:
        """The cluster's state. Raises UnavailableError if it is not known."""
        cluster = self.link.cluster
        if cluster is None:
            raise UnavailableError("not ready: the conductor does not answer")
        return cluster

    def ready_cluster(self) -> ClusterState:
        """The cluster's state. Raises UnavailableError that says what is missing, if it cannot serve."""
        cluster = self.cluster()
        missing = [
            f"no {role} instance"
            for role, num in (("prefill", cluster.num_prefill), ("decode", cluster.num_decode))
            if num == 0
        ]
        if missing:
            raise UnavailableError(f"not ready: {' and '.join(missing)} has registered")
        return cluster

    async def read_body(self, request: Request) -> bytes:
        """Raises RequestError if it is too large, ClientDisconnect if the client hangs up."""
        return await read_body(request, self.config.max_request_bytes)

    async def read_job(self, endpoint: Endpoint, body: bytes, key: ApiKey | None) -> Job:
        """The valid job in `body`, for a cluster that could hold it. Raises RequestError.

        Whether there are instances to serve it is the Conductor's to say: a lost one may come back.
        """
        now_s = asyncio.get_running_loop().time()
        read = functools.partial(
            read_job,
            endpoint,
            body,
            self.model,
            self.config.served_model_name,
            self.config.max_choices,
            key,
            lambda name: self.caches.find(key, name, now_s, param="context_cache"),
        )
        job = fit_into_pool(await beside(body, read), self.cluster(), self.model.block_size)
        if job.grammar is not None:
            await self._check(job.grammar)
        return job

    async def _check(self, grammar: WantedGrammar) -> None:
        grammars = self.model.grammars
        if grammars.num_waiting >= _MAX_WAITING_GRAMMARS:
            raise OverloadedError(f"{grammars.num_waiting} grammars are being compiled", RETRY_AFTER_S)
        try:
            await grammars.get(grammar.text)
        except GrammarError as error:
            raise RequestError(
                f"{grammar.field}: {error}", param=grammar.field, code="invalid_schema"
            ) from None

    async def about_tokens(
        self, answer: Callable[[bytes, ServedModel, str], dict[str, Any]], request: Request
    ) -> dict[str, Any]:
        """What `answer` makes of a request's body. Raises RequestError."""
        body = await self.read_body(request)
        return await beside(body, functools.partial(answer, body, self.model, self.config.served_model_name))


def key_of(request: Request) -> ApiKey | None:
    """The client's, if clients need one."""
    key: ApiKey | None = request.scope["state"].get("api_key")
    return key


async def beside(body: bytes, read: Callable[[], T]) -> T:
    """In a thread, if `body` may take long."""
    return read() if len(body) <= _MAX_INLINE_BYTES else await asyncio.to_thread(read)
