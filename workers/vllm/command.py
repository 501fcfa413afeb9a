"""The command that starts the vLLM server of an instance, and the number of its threads.

Owns: options and environment. Does not know: what becomes of the server.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncake.errors import ConfigError
from mooncake.node.process_config import WorkerProcess

MODEL = "model"
"""The model's name in the server's API."""
CHUNK_TOKENS = 2048
"""The default limit of prompt tokens that vLLM computes in a step, beside the tokens that it decodes."""
_BIND, _NUM_THREADS = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"
_NOT_BOUND = "nobind"
_EXECUTOR = "--distributed-executor-backend"
_OTHERWISE = (_EXECUTOR, "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
"""vLLM's options for another executor, and for several ranks, which need another executor."""


@dataclass(frozen=True, slots=True)
class Computing:
    """The way in which vLLM for CPUs computes: in its engine's process, with a number of threads chosen here.

    By default vLLM computes in a further process, which can be bound to cores, beside the engine's process.
    While one of the two processes works, the other one polls: this takes a second core, or half of the time
    of a single core. So vLLM computes in the engine's process here, unless the environment binds vLLM to
    cores.
    """

    environment: dict[str, str]
    """Environment variables that vLLM gets additionally."""
    options: list[str]

    @classmethod
    def of(cls, process: WorkerProcess, inherited: Mapping[str, str]) -> "Computing":
        """Return the settings for an instance whose worker has the environment `inherited`.

        Both are empty if `vllm.options` choose another executor, or if `inherited` binds vLLM to cores.
        """
        config = process.config
        is_chosen = any(option.startswith(_OTHERWISE) for option in config.vllm.options)
        if is_chosen or inherited.get(_BIND, _NOT_BOUND) != _NOT_BOUND:
            return cls({}, [])
        configured = config.worker.num_threads
        if isinstance(configured, int):
            num_threads = str(configured)
        else:
            num_cores = len(os.sched_getaffinity(0))
            num_threads = inherited.get(_NUM_THREADS, str(max(1, num_cores // process.num_local_workers)))
        return cls.in_engine(num_threads)

    @classmethod
    def in_engine(cls, num_threads: str) -> "Computing":
        """Return the settings to compute in vLLM's engine process, with `num_threads` threads."""
        environment = {
            _BIND: _NOT_BOUND,
            _NUM_THREADS: num_threads,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM for CPUs does not heed the option
        }
        return cls(environment, [_EXECUTOR, "uni"])


def event_endpoints(process: WorkerProcess, port: int) -> tuple[str, str]:
    """Return the endpoints of vLLM's KV events and of their replays.

    Only processes of the same Unix user can open them.
    """
    folder = Path(process.messenger_socket).parent
    return f"ipc://{folder}/kv-{port}", f"ipc://{folder}/kv-{port}r"


def serve_command(process: WorkerProcess, port: int, computing: Computing) -> list[str]:
    """Return the command line of this instance's server. Raises ConfigError without a model directory."""
    config = process.config
    if config.model is None:
        raise ConfigError("engine vllm reads Hugging Face directories only: name one with --model")
    transfer = {
        "kv_connector": "MooncakeServeConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "pool": f"unix:{process.messenger_socket}",
            "block_size": config.kvcache.block_size,
        },
    }
    endpoint, replay_endpoint = event_endpoints(process, port)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
    }
    return [
        *(config.vllm.command, "serve", config.model, "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", config.dtype),
        *("--block-size", str(config.kvcache.block_size), "--max-num-seqs", str(config.worker.max_batch)),
        *("--kv-cache-memory-bytes", str(int(config.kvcache.device_bytes))),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--skip-tokenizer-init"),
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--enable-prefix-caching", "--kv-events-config", json.dumps(events)),
        *computing.options,
        *config.vllm.options,
    ]
