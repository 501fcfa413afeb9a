"""Layers or KV heads of a busy instance go to an idle one by themselves: `conductor.migrate_modules`."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import HTTP, Server, eventually
from tests.cluster.tiny_cluster import body, post, text_of, tiny_server
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NUM_PAGES = 300
PAGE_BYTES = 8 * 4 * 4 * 2 * 64 * 4
"""8 tokens x 4 layers x 4 heads x (K, V) x 64 x 4 bytes."""
NUM_TOKENS = 2300


def helpers(server: Server) -> dict[str, Any]:
    """The parts that decode instances have elsewhere, by their helper."""
    listed = HTTP.get(f"{server.url}/admin/instances", timeout=DEADLINE_S).json()["instances"]
    return {one["modules"]["helper"]: one["modules"]["part"] for one in listed if one["modules"]["helper"]}


def test_modules_of_a_busy_instance_go_to_an_idle_one(tmp_path: Path, run_dir: Path) -> None:
    tiny_model(
        "llama3",
        tmp_path / "tiny",
        hidden_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
    )
    write_tiny_tokenizer(tmp_path / "tiny")
    pools = [f"--kvcache-{pool}-bytes={NUM_PAGES * PAGE_BYTES}" for pool in ("device", "pool")]
    flags = ["--num-decode=2", *pools]
    flags += ["--conductor-migrate-modules=true", "--conductor-migrate-for-slos=false"]
    with tiny_server(tmp_path / "tiny", run_dir, *flags) as server, ThreadPoolExecutor(1) as client:
        asked = body(list(range(3, 30)), num_tokens=NUM_TOKENS)
        answers = [client.submit(post, server, asked)]
        parts: list[dict[str, Any]] = []

        def have_moved() -> bool:
            if answers[-1].done():
                assert answers[-1].result().status_code == 200, answers[-1].result().text
                answers.append(client.submit(post, server, asked))
            # A part that goes back because the machine is busy is empty for a moment.
            parts.extend(part for part in helpers(server).values() if part["layers"] or part["num_heads"])
            return bool(parts)

        eventually(have_moved, "modules are at a helper")
        [part] = parts
        if part["layers"] is not None:
            assert part["layers"]["stop"] == 4
            assert 1 <= part["layers"]["start"] <= 3, "some of four"
        else:  # a busy machine would take longer for a layer than the Conductor allows
            assert 1 <= part["num_heads"] <= 3
        answers.append(client.submit(post, server, asked))
        texts = [text_of(answer.result().json()) for answer in answers]
        assert len(texts) >= 2
        assert len(set(texts)) == 1, "as if nothing had moved"
