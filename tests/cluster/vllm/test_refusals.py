"""What a pool and a vLLM server do not agree on is refused by name when the server starts."""

import random
from pathlib import Path

import pytest

from tests.cluster.harness import Server
from tests.cluster.vllm.server import TINY_OPTIONS, VllmServer
from tests.tiny_models import VOCAB_SIZE, tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(3600)]


def test_what_does_not_match_is_refused_by_name(
    model: Path, pool: Server, socket: Path, tmp_path: Path
) -> None:
    with VllmServer(model, tmp_path / "a.log", *TINY_OPTIONS, pool=f"unix:{socket}").start() as first:
        first.complete(random.Random(0).choices(range(VOCAB_SIZE), k=100))
    other = tmp_path / "other"
    tiny_model("qwen3", other, max_position_embeddings=2048, rope_theta=5.0)
    refused = {
        "model fingerprint differs": VllmServer(
            other, tmp_path / "b.log", *TINY_OPTIONS, pool=f"unix:{socket}"
        ),
        "dtype differs: ours is bfloat16, theirs is float32": VllmServer(
            model, tmp_path / "c.log", *TINY_OPTIONS, "--dtype", "bfloat16", pool=f"unix:{socket}"
        ),
        "unknown key pol; did you mean pool": VllmServer(
            model, tmp_path / "d.log", *TINY_OPTIONS, pol=f"unix:{socket}"
        ),
        "block size differs": VllmServer(
            model, tmp_path / "e.log", *TINY_OPTIONS, pool=f"unix:{socket}", block_size=64
        ),
    }
    for message, server in refused.items():
        assert message in server.start().wait()
