"""A tensor-parallel group over torch.distributed: gloo between CPUs, NCCL between GPUs.

A process is in one group at a time. When a rank of the group is lost, the other ranks can join a new group.

Owns: the process group, its deadline, the order of sums. Does not know: models, how ranks are started and
replaced.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from workers.engine.tensor_parallel import RankLost, TensorShard


def shard_of(rank: int, size: int, device: torch.device) -> TensorShard:
    """Return the collective calls of a rank, for use in any of its successive groups.

    The calls raise RankLost outside of any group.
    """
    all_reduce = _all_reduce_by_nccl if device.type == "cuda" else _all_reduce_in_order
    return TensorShard(rank, size, all_reduce, _all_gather)


@contextmanager
def join_group(
    store: Store, rank: int, size: int, device: torch.device, *, interface: str, timeout_s: float
) -> Iterator[TensorShard]:
    """Make a context in which this rank is in a process group with the other ranks, which meet in `store`.

    `store` is new for each group: a `FileStore` in a private directory for the ranks of one host, else a
    `TCPStore`, which listens on every interface. What is exchanged goes over the network `interface`
    (`lo` on one host), neither encrypted nor authenticated.

    Raises RankLost if not all ranks have joined within `timeout_s` seconds. Later each collective call waits
    at most `timeout_s` for the other ranks, so no rank may lag behind by more. Calls fail at once if another
    rank's process has ended. On CUDA calls are only queued: there NCCL's watchdog ends this process if a call
    takes longer than `timeout_s`.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    is_cuda = device.type == "cuda"
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if is_cuda else None,
        )
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} has not met all others in {timeout_s} s: {error}") from error
    try:
        yield shard_of(rank, size, device)
    finally:
        dist.destroy_process_group()


def _all_gather(part: torch.Tensor) -> torch.Tensor:
    with _losses_named():
        gathered = torch.empty((dist.get_world_size(), *part.shape), dtype=part.dtype, device=part.device)
        dist.all_gather(list(gathered), part)
    return gathered


def _all_reduce_in_order(tensor: torch.Tensor) -> None:
    """Sum all parts on every rank in place, in float32 and in the order of the ranks.

    gloo's own sum starts at another rank for each piece of the tensor, so the bits of a token's sum would
    depend on the size of its batch. With two ranks this sum sends as many bytes as gloo's, and waits half
    as often.
    """
    parts = _all_gather(tensor)
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    tensor.copy_(total)


def _all_reduce_by_nccl(tensor: torch.Tensor) -> None:
    with _losses_named():
        dist.all_reduce(tensor)


@contextmanager
def _losses_named() -> Iterator[None]:
    if not dist.is_initialized():
        raise RankLost("this rank is in no group")
    try:
        yield
    except RuntimeError as error:
        raise RankLost(
            f"rank {dist.get_rank()} of {dist.get_world_size()} has lost another: {error}"
        ) from error
