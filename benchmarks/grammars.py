"""The cost of a grammar in a decode step: the CPU time of forward pass and draw, with and without one.

    python -m benchmarks.grammars

The default model's sizes and tokenizer, random weights, bfloat16, one thread, greedy. Each sequence has its
own state in the schema. A sequence that has ended begins anew. The table has medians of 40 steps.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.engine import CONTEXT_LEN, PAGE_SIZE, SMOLLM2
from mooncake.messages.requests import Request, SamplingParams
from mooncake.model.checkpoint import open_checkpoint
from mooncake.model.grammar import Grammar, Grammars
from mooncake.model.tokenizer import load_vocabulary
from workers.engine.batch import Batch, Chunk
from workers.engine.kvcache.device_kvcache import DeviceKVCache
from workers.engine.model import DecoderModel
from workers.execution.draws import Draws, Row, rules_of
from workers.execution.model_spec import model_spec

NUM_STEPS = 40
BATCH_SIZES = (1, 8)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS = {"none": None, "of a person": PERSON, "any object": {"type": "object"}}


def main() -> None:
    """Measure all sizes and schemas, and print one table."""
    torch.set_num_threads(1)
    spec = model_spec(SMOLLM2)
    model = DecoderModel(spec, range(spec.num_layers), torch.bfloat16)
    model.init_dummy_weights()
    kv = DeviceKVCache(spec, range(spec.num_layers), 512, PAGE_SIZE, torch.bfloat16)
    grammars = Grammars(lambda: load_vocabulary(open_checkpoint(None)))
    print("| sequences | schema | forward ms | draw ms | draw p90 ms |\n|---|---|---|---|---|")
    for batch_size in BATCH_SIZES:
        tables = [kv.pages.allocate(-(-(CONTEXT_LEN + 1) // PAGE_SIZE)) for _ in range(batch_size)]
        chunks = [Chunk([1000], CONTEXT_LEN, pages) for pages in tables]
        for name, schema in SCHEMAS.items():
            grammar = None
            if schema is not None:
                grammar = asyncio.run(grammars.get(f"start: %json {json.dumps(schema)}\n"))
            forward_ms, draw_ms = measure(model, kv, chunks, grammar)
            middle, high = statistics.median(draw_ms), statistics.quantiles(draw_ms, n=10)[-1]
            row = (batch_size, name, f"{statistics.median(forward_ms):.1f}", f"{middle:.2f}", f"{high:.2f}")
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
        for pages in tables:
            kv.pages.free(pages)


def measure(
    model: DecoderModel, kv: DeviceKVCache, chunks: Sequence[Chunk], grammar: Grammar | None
) -> tuple[list[float], list[float]]:
    """Return the CPU milliseconds of each step's forward pass, and those of each step's draw."""
    request = Request("r", [1], [], SamplingParams(NUM_STEPS, temperature=0, stop_token_ids=(2,)), "front")
    rows = [(rules_of(request, None if grammar is None else grammar.begin()), list[int]()) for _ in chunks]
    forward_ms, draw_ms = [], []
    for step in range(NUM_STEPS):
        batch = Batch.build(chunks, kv)
        draws = Draws([Row(request.sampling, step, rules, output) for rules, output in rows])
        began_s = time.thread_time()
        logits = model.forward(batch, kv)
        forward_ms.append((time.thread_time() - began_s) * 1e3)
        # So that sequences differ.
        logits = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(step))
        drawing_s = time.thread_time()
        tokens = draws.draw(logits).tokens
        draw_ms.append((time.thread_time() - drawing_s) * 1e3)
        for index, token in enumerate(tokens):
            rows[index][1].append(token)
            if token == 2:
                rows[index] = (rules_of(request, None if grammar is None else grammar.begin()), [])
    return forward_ms, draw_ms


if __name__ == "__main__":
    main()
