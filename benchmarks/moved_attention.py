"""A decode step with KV heads or parts of sequences at a helper, compared with the same step in one process.

  .venv/bin/python -m benchmarks.moved_attention [--sequences] [--tokens 16384] [--batches 1 8]

The engine alone is measured, with random weights in bfloat16 and the shapes of three models. Each of the two
processes has one computing thread. Both kinds of steps have the same KVCache. Their logits must be equal bit
for bit. With `--sequences` sums have another order, and logits may differ by 5% of the largest one. Then both
kinds of steps take turns, so that other load on the machine slows both. Heads cannot take turns: steps before
their move are compared with steps after it.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine import SMOLLM2
from benchmarks.other_host import THERE, enter, other_host
from messenger.transport.listeners import listen_tcp
from mooncake.messages.migration import ModulesPart
from mooncake.security.keys import ClusterKey
from workers.decode.migration.kvcache_move import KVCacheMove
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.execution.model_spec import model_spec
from workers.modules.connections import Owners
from workers.modules.helper_link import HelperAccess, HelperLink
from workers.modules.hosting import ModulesHost
from workers.modules.link_messages import LINK_VERSION, HostModules

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TINY = {
    **QWEN,
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "head_dim": 64,
}
"""Weights so small that attention is nearly the whole step."""
SHAPES = {
    "SmolLM2-135M": {**SMOLLM2, "max_position_embeddings": 32_768},
    "Qwen2.5-0.5B": QWEN,
    "tiny": TINY,
}
PAGE_SIZE = 32
NUM_STEPS, NUM_TURNS = 15, 4
ACCESS = HelperAccess(ClusterKey.generate(), 60.0)
FINGERPRINT = "benchmark"
PORT = 7100


def empty(shape: str, num_pages: int) -> tuple[DecoderModel, DeviceKVCache]:
    """Return a model without weights, and a KVCache for it."""
    spec = model_spec(SHAPES[shape])
    layers = range(spec.num_layers)
    model = DecoderModel(spec, layers, torch.bfloat16)
    return model, DeviceKVCache(spec, layers, num_pages, PAGE_SIZE, torch.bfloat16)


def help_owners(shape: str, num_pages: int, path: str, host: str | None) -> None:
    """Run as the helper until killed, on another host if `host` names one."""
    torch.set_num_threads(1)
    model, kv = empty(shape, num_pages)
    with contextlib.ExitStack() as stack:
        owners = None
        if host is not None:
            enter(host)
            owners = Owners(stack.enter_context(listen_tcp(THERE, PORT)), ACCESS.key)
        asyncio.run(
            ModulesHost("helper", path, FINGERPRINT, model, kv, lambda: 0, lambda: False, owners).run()
        )


def wait_for(path: Path) -> None:
    """Wait until the helper listens at `path`."""
    while not path.exists():
        time.sleep(0.1)


class Steps:
    """Decode steps over one batch."""

    def __init__(self, shape: str, batch_size: int, num_tokens: int) -> None:
        num_pages = batch_size * -(-num_tokens // PAGE_SIZE)
        self.model, self.kv = empty(shape, num_pages)
        self.model.init_dummy_weights()
        generator = torch.Generator().manual_seed(0)
        for layer in self.kv.layers:
            self.kv.layer(layer).normal_(generator=generator)
        tables = [self.kv.pages.allocate(num_pages // batch_size) for _ in range(batch_size)]
        self.chunks = [Chunk([1000], num_tokens - 1, pages) for pages in tables]

    def measure(self, chunks: Sequence[Chunk]) -> tuple[list[float], torch.Tensor]:
        """Return the seconds of steps over `chunks`, and the logits."""
        times_s = []
        for _ in range(NUM_STEPS + 2):
            began_s = time.perf_counter()
            logits = self.model.forward(Batch.build(chunks, self.kv), self.kv)
            times_s.append(time.perf_counter() - began_s)
        return times_s[2:], logits

    async def move(self, address: str, part: ModulesPart) -> tuple[HelperLink, list[Chunk]]:
        """Move a part of the model or of sequences to the helper at `address`.

        Returns the connection, and the chunks of steps with the helper.
        """
        kv, num_sequences = self.kv, len(self.chunks)
        request = HostModules(
            LINK_VERSION,
            "owner",
            FINGERPRINT,
            part,
            kv.pages.num_pages,
            kv.pages.num_pages,
            num_sequences,
            num_sequences,
        )
        link = await HelperLink.connect(address, request, self.model, kv, ACCESS, lambda: None)
        move = KVCacheMove(self.model.library, kv, link.num_pages, link.helped)
        move.copy(kv.pages.used())
        move.complete()
        if not part.share:
            return link, self.chunks
        return link, [
            Chunk(chunk.token_ids, chunk.start, self._divided(list(chunk.pages), part.share))
            for chunk in self.chunks
        ]

    def _divided(self, pages: list[int], share: float) -> list[int]:
        """Copy a sequence's first pages to the helper, and return the new page table."""
        num = int(share * len(pages))
        there = self.kv.pages.allocate(num, num)
        assert self.kv.pages.num_hosted_of(there) == num, "no other page is free"
        source, target = torch.tensor(pages[:num]), torch.tensor(there)
        for layer in self.kv.layers:
            self.kv.scatter(layer, target, self.kv.gather(layer, source))
        return there + pages[num:]


async def compare(shape: str, batch_size: int, num_tokens: int, host: str | None, *, sequences: bool) -> None:
    """Measure one model and batch size, and print a row. `host`: the helper's host, or None for this one."""
    steps = Steps(shape, batch_size, num_tokens)
    num_kv_heads = steps.model.spec.num_kv_heads
    part = ModulesPart(share=0.5) if sequences else ModulesPart(num_kv_heads // 2)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "heads")
        context = multiprocessing.get_context("fork")  # with the same key
        arguments = (shape, 2 * steps.kv.pages.num_pages, path, host)
        helper = context.Process(target=help_owners, args=arguments, daemon=True)
        helper.start()
        await asyncio.to_thread(wait_for, Path(path))
        alone_s, expected = steps.measure(steps.chunks)
        link, helped_chunks = await steps.move(path if host is None else f"tcp://{THERE}:{PORT}", part)
        helped_s, logits = steps.measure(helped_chunks)
        if sequences:
            assert float((logits - expected).abs().max() / expected.abs().max()) < 0.05
            alone_s.clear()
            helped_s.clear()
            for _ in range(NUM_TURNS):
                alone_s += steps.measure(steps.chunks)[0]
                helped_s += steps.measure(helped_chunks)[0]
        else:
            assert torch.equal(logits, expected)
        await link.end()
        helper.kill()
        helper.join()
    alone, helped = statistics.median(alone_s), statistics.median(helped_s)
    print(
        f"| {shape} | {batch_size} | {part.what} "
        f"| {1000 * alone:.1f} ms | {1000 * helped:.1f} ms | {helped / alone:.2f} |",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all models and batch sizes, and print one table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moved_attention", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="of each sequence")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--sequences", action="store_true", help="the helper has half of each sequence")
    parser.add_argument("--two-hosts", action="store_true", help="the helper is on another host, over TCP")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| model | batch | at the helper | step alone | step with the helper | ratio |")
    print("|---|---|---|---|---|---|", flush=True)
    with other_host() if options.two_hosts else contextlib.nullcontext() as host:
        for shape in SHAPES:
            for batch_size in options.batches:
                asyncio.run(compare(shape, batch_size, options.tokens, host, sequences=options.sequences))


if __name__ == "__main__":
    main()
