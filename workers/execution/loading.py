"""Loading of a checkpoint into an executor: device, threads, weights, memory.

Owns: the choices made once at start. Does not know: later computations.
"""

import functools
import os

import torch

from mooncake.config.sections import KVCacheConfig
from mooncake.errors import ConfigError, ModelError
from mooncake.messages.blocks import DTYPE_BYTES, KVDtype, KVLayout
from mooncake.messages.workers import Role
from mooncake.model.checkpoint import DUMMY_SEED, Checkpoint, CheckpointKind, check_unchanged
from mooncake.model.grammar import Grammars
from mooncake.model.tokenizer import load_vocabulary
from mooncake.node.memory import available_bytes
from mooncake.node.process import Progress, report
from mooncake.node.process_config import RankConfig, StageConfig, WorkerProcess
from mooncake.node.segments import GIB
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.engine.process_group import shard_of
from workers.engine.spec import ModelSpec, UnsupportedModel
from workers.engine.tensor_parallel import kv_heads_of
from workers.engine.warm_up import warm_up
from workers.engine.weights import Weights, WeightsError
from workers.execution.executor import Executor
from workers.execution.model_spec import spec_of
from workers.execution.pass_record import PassRecord
from workers.execution.weights import iter_weights

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_PREFILL_CHUNK, _GPU_PREFILL_CHUNK = 512, 2048
_CPU_SATURATING_TOKENS = 128


def layers_of_stage(num_layers: int, stage: StageConfig) -> range:
    """Return the layers of one stage. The numbers of layers of two stages differ by at most one.

    Raises ConfigError if there are more stages than layers.
    """
    if stage.num_stages > num_layers:
        raise ConfigError(f"pipeline.stages: {stage.num_stages} stages for a model of {num_layers} layers")
    return range(
        num_layers * stage.number // stage.num_stages, num_layers * (stage.number + 1) // stage.num_stages
    )


def heads_of(spec: ModelSpec, rank: RankConfig) -> list[range]:
    """Return the KV heads of each rank. The first rank has at least as many as any other rank.

    Raises ConfigError if there are more ranks than KV heads.
    """
    if rank.size > spec.num_kv_heads:
        raise ConfigError(
            f"worker.tensor_parallel: {rank.size} ranks for a model of {spec.num_kv_heads} KV heads;"
            " each needs one or more"
        )
    return [kv_heads_of(spec, number, rank.size) for number in range(rank.size)]


def load_executor(
    checkpoint: Checkpoint, layout: KVLayout, process: WorkerProcess, record: PassRecord | None = None
) -> Executor:
    """Load this stage's layers, or this rank's part of all layers, and allocate the device's KVCache.

    `layout` is the whole model's. The executor names the requests of each pass in `record`. The call blocks
    for seconds to minutes, and reports its progress. Raises ConfigError or ModelError.
    """
    device = pick_device(process.config.worker.device, process.rank)
    try:
        model, kv = _on_device(checkpoint, layout, process, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has too little memory beside the weights of {checkpoint.name}: make"
            f" kvcache.device_bytes or worker.prefill_chunk smaller ({error})"
        ) from None
    kv.take_memory_beside()
    grammars = Grammars(lambda: load_vocabulary(checkpoint))
    grammars.prepare()
    return Executor(model, kv, grammars, record, functools.partial(refill, checkpoint))


def refill(checkpoint: Checkpoint, weights: Weights) -> None:
    """Fill weights from `checkpoint`, from which the same layers were loaded before.

    Raises ModelError if the checkpoint has changed or cannot be read.
    """
    check_unchanged(checkpoint)
    try:
        if checkpoint.kind is CheckpointKind.DUMMY:
            weights.init_dummy(DUMMY_SEED)
        else:
            weights.load(iter_weights(checkpoint, weights.layers, lambda _done, _all: None, has_ends=False))
    except WeightsError as error:
        raise ModelError(f"{checkpoint.name}: {error}") from None


def _on_device(
    checkpoint: Checkpoint, layout: KVLayout, process: WorkerProcess, device: torch.device
) -> tuple[DecoderModel, DeviceKVCache]:
    """Return the loaded model and the allocated KVCache, after a warm-up."""
    config, rank = process.config, process.rank
    dtype = TORCH_DTYPES[layout.dtype]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    try:
        spec = spec_of(checkpoint.model)
        layers = layers_of_stage(spec.num_layers, process.stage)
        window = layer_window(process, layers, device)
        num_pages = _num_device_pages(
            config.kvcache, layout.of_layers(layers).of_heads(heads_of(spec, rank)[0]), window
        )
        _check_memory(checkpoint, len(layers) / spec.num_layers / rank.size, layout.dtype, device)
        shard = shard_of(rank.number, rank.size, device) if rank.size > 1 else None
        model = DecoderModel(spec, layers, dtype, device, shard=shard)
        _set_num_threads(model, config.worker.num_threads, process.num_local_workers)
        if checkpoint.kind is CheckpointKind.DUMMY:
            model.init_dummy_weights(DUMMY_SEED)
        else:
            model.load_weights(iter_weights(checkpoint, layers, _report_weights))
    except (UnsupportedModel, WeightsError) as error:
        raise ModelError(f"{checkpoint.name}: {error}") from None
    kv = DeviceKVCache(
        spec, layers, num_pages, layout.block_size, dtype, device, kv_heads=model.kv_heads, window=window
    )
    if device.type == "cuda" and shard is None:  # a rank computes nothing without the others
        chunk_len = pick_prefill_chunk(config.worker.prefill_chunk, device)
        # An instance of either role is warmed up, because its role may change.
        warm_up(
            model, kv, chunk_len=chunk_len, max_batch=config.worker.max_batch, on_progress=_report_warm_up
        )
    return model, kv


def _check_memory(checkpoint: Checkpoint, share: float, dtype: KVDtype, device: torch.device) -> None:
    """Check that the device has memory for `share` (0 to 1) of the checkpoint's weights. Raises ModelError.

    Without the check, the operating system would kill some process.
    """
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    needed = checkpoint.model.num_parameters * share * DTYPE_BYTES[dtype]
    if available is not None and needed > available:
        raise ModelError(
            f"{checkpoint.name}: its weights take {needed / GIB:.1f} GiB in {dtype},"
            f" {available / GIB:.1f} GiB of memory are available ({device.type})"
        )


def layer_window(process: WorkerProcess, layers: range, device: torch.device) -> int | None:
    """Return the number of layers for which the device has memory at a time; None for all layers.

    Only prefill instances can have a window. Raises ConfigError if their passes are shorter than a block.
    """
    config = process.config
    window = config.worker.prefill_layer_window
    if process.role is not Role.PREFILL or window == "all":
        return None
    chunk = pick_prefill_chunk(config.worker.prefill_chunk, device)
    if chunk < config.kvcache.block_size:
        raise ConfigError(
            f"worker.prefill_layer_window needs passes of whole blocks: worker.prefill_chunk is {chunk},"
            f" kvcache.block_size {config.kvcache.block_size}"
        )
    return window if window < len(layers) else None


def _num_device_pages(kvcache: KVCacheConfig, layout: KVLayout, window: int | None) -> int:
    device_bytes = int(kvcache.device_bytes)
    page_bytes = layout.layer_bytes * (window or layout.num_layers)
    num_pages = device_bytes // page_bytes
    if num_pages < 2:
        raise ConfigError(
            f"kvcache.device_bytes: {device_bytes} bytes hold {num_pages} blocks of {page_bytes}"
            " bytes; at least 2 are needed"
        )
    return num_pages


def pick_device(name: str, rank: RankConfig) -> torch.device:
    """Return the configured device; for `auto` the first GPU, or the CPU if there is no GPU.

    On GPUs, rank r gets the r-th GPU behind the configured one. Raises ConfigError if there is no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    device = torch.device("cuda", (device.index or 0) + (rank.number if rank.size > 1 else 0))
    if device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"worker.device: {device} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def pick_prefill_chunk(configured: int | str, device: torch.device) -> int:
    """Return the most tokens of a prefill pass: the configured number, or the default for the device.

    The default keeps the device busy, and lets urgent prompts wait only shortly for the end of a pass.
    """
    if isinstance(configured, int):
        return configured
    return _GPU_PREFILL_CHUNK if device.type == "cuda" else _CPU_PREFILL_CHUNK


def pick_saturating_tokens(device: torch.device) -> int | None:
    """Return the number of tokens with which a pass reaches the device's full speed; None if unknown."""
    return None if device.type == "cuda" else _CPU_SATURATING_TOKENS


def _set_num_threads(model: DecoderModel, configured: int | str, num_local_workers: int) -> None:
    """Set the number of threads that compute.

    The kernels of `kernels.cpu` use only idle cores, so each worker may use all cores. Torch's threads would
    stall one another if they outnumbered the cores, so with torch the workers share the cores evenly.
    """
    num_cores = len(os.sched_getaffinity(0))
    num_threads = configured if isinstance(configured, int) else num_cores
    if model.use_idle_cores(num_threads):
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(
            configured if isinstance(configured, int) else max(1, num_cores // num_local_workers)
        )


def _report_weights(done_bytes: int, total_bytes: int) -> None:
    report(Progress("loading weights", done_bytes, total_bytes))


def _report_warm_up(done: int, total: int) -> None:
    report(Progress("warming up", done, total))
