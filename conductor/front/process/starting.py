"""The start of a process that has a front: the model, the front's settings, the report of readiness.

Owns: which part of the configuration a front gets, the signal that drains it. Does not know: where the
Conductor is.
"""

import asyncio
import gc
from typing import NamedTuple

from conductor.front.config import FrontConfig
from conductor.front.http.draining import FrontDrain
from conductor.front.openai.model import ServedModel, load_served_model
from conductor.front.openai.tool_calls import ToolFormat
from mooncake.config.settings import Config
from mooncake.messages.blocks import KVDtype
from mooncake.messages.costs import ModelShape
from mooncake.model.checkpoint import open_checkpoint
from mooncake.node.process import Draining, Ready, drain_on_sigterm, report, stop
from mooncake.security.keys import ClusterKey

_NUM_NEW_OBJECTS = 20_000
"""The number of new Python objects after which the garbage collector runs."""


class OpenedModel(NamedTuple):
    """The configured model, without its weights.

    `name` is the name of the checkpoint. `served` has the tokenizer and the limits, for the front.
    """

    name: str
    shape: ModelShape
    dtype: KVDtype
    served: ServedModel


async def open_model(config: Config) -> OpenedModel:
    """Return the configured model. Raises ModelError."""
    checkpoint = await asyncio.to_thread(open_checkpoint, config.model, config.load_format)
    dtype = checkpoint.dtype_of(config.dtype)
    tool_format = None if config.http.tool_parser == "auto" else ToolFormat(config.http.tool_parser)
    served = await asyncio.to_thread(
        load_served_model, checkpoint, dtype, config.kvcache.block_size, tool_format
    )
    return OpenedModel(checkpoint.name, checkpoint.model.shape, dtype, served)


def front_config(config: Config, model_name: str, key: ClusterKey) -> FrontConfig:
    """Return the settings of a process's front.

    `model_name` is the name under which the model is served, unless the configuration names another.
    """
    return FrontConfig(
        host=config.http.host,
        port=config.http.port,
        reply_endpoint=config.conductor.reply_endpoint,
        reply_listen_endpoint=config.conductor.reply_listen_endpoint,
        served_model_name=config.served_model_name or model_name,
        ttft_slo_s=config.conductor.ttft_slo_s,
        tbt_slo_s=config.conductor.tbt_slo_s,
        slo_classes={name: promised.priority for name, promised in config.conductor.slo_classes.items()},
        max_request_bytes=int(config.http.max_request_bytes),
        api_keys_file=config.http.api_keys_file,
        admin_listen=config.http.admin_listen,
        admin_keys_file=config.http.admin_keys_file,
        context_cache_tokens=config.http.context_cache_tokens,
        record=config.conductor.record,
        record_bytes=int(config.conductor.record_bytes),
        tls_cert=config.http.tls_cert,
        tls_key=config.http.tls_key,
        cors_origins=tuple(config.http.cors_origins),
        absence_timeout_s=config.conductor.absence_timeout_s,
        cluster_key=key,
    )


def front_drain(config: Config) -> FrontDrain:
    """Return the drain of this front. It begins at SIGTERM, and its end stops the process.

    If the drain has not ended `worker.drain_timeout_s` after SIGTERM, the process stops all the same. Needs a
    running event loop.
    """
    drain = FrontDrain(stop)

    def begin() -> None:
        if num := drain.num_open:
            report(Draining(f"{num} open answer{'' if num == 1 else 's'}"))
        drain.begin()

    drain_on_sigterm(begin, config.worker.drain_timeout_s)
    return drain


def announce(ready: Ready) -> None:
    """Prepare the garbage collector for serving, and report to the supervisor that the process is ready."""
    # Objects of the start stay for good. Collections that visit them would stop all streams for 50 ms.
    gc.collect()
    gc.freeze()
    # One message with the tokens of all streams makes more objects than Python's default threshold.
    gc.set_threshold(_NUM_NEW_OBJECTS, *gc.get_threshold()[1:])
    report(ready)
