"""The process of one rank of a tensor-parallel group."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.deadline import DEADLINE_S
from tests.forked import preload
from tests.workers.engine.ranks import Outcome, generate
from workers.engine.model import DecoderModel
from workers.engine.process_group import join_group
from workers.engine.spec import ModelSpec
from workers.engine.tensor_parallel import RankLost, TensorShard

SPEC = ModelSpec("LlamaForCausalLM", 500, 96, 112, 2, 9, 3, 64, 256, tie_word_embeddings=True)
LOST = 3
preload("tests.workers.engine.group_rank")


def device_of(rank: int, size: int) -> torch.device:
    """Return a GPU for the rank if there is one for each rank, else the CPU."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= size else torch.device("cpu")


def generate_of(shard: TensorShard, device: torch.device) -> Outcome:
    """Return the outcome of a rank. It is the same for every kind of group of one size."""
    model = DecoderModel(SPEC, range(SPEC.num_layers), torch.bfloat16, device, shard=shard)
    model.init_dummy_weights(seed=5)
    return generate([model], [list(range(30)), [7], list(range(300, 311))], num_new=5, chunk_size=16)


def main(folder: Path, rank: int, size: int, timeout_s: float, work: str, num_coming: int) -> None:
    """Be a rank. Only the first `num_coming` ranks join the group, when all of them have started.

    With the work `generate` the rank writes its outcome to `folder`; with `sum` it adds numbers up until
    another rank is lost. After the loss of a rank the exit status is `LOST`.
    """
    try:
        _join(folder, rank, size, timeout_s, work, num_coming)
    except RankLost as lost:
        print(lost, flush=True)
        sys.exit(LOST)


def _join(folder: Path, rank: int, size: int, timeout_s: float, work: str, num_coming: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    store.set(f"started {rank}", "")
    store.wait([f"started {other}" for other in range(num_coming)], timedelta(seconds=DEADLINE_S))
    device = device_of(rank, size)
    with join_group(store, rank, size, device, interface="lo", timeout_s=timeout_s) as shard:
        if work == "generate":
            assert shard.any([True, False]) == [True, False]
            torch.save(generate_of(shard, device), folder / f"{rank}.pt")
            return
        for number in range(sys.maxsize):
            tensor = torch.full((64, 96), float(rank))
            shard.all_reduce(tensor)
            if number == 0:
                print(float(tensor[0, 0]), flush=True)
