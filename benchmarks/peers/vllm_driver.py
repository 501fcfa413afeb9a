"""The driver of vLLM without a server: it prefills one prompt after the other.

  python vllm_driver.py MODEL_DIRECTORY

The Python of vLLM's virtual environment runs it. A line of stdin is a prompt, as a JSON list of token ids.
The first line of stdout says that the engine is ready. Each further line is the seconds from a prompt to its
first token.
"""

import json
import os
import sys
import time

MAX_MODEL_LEN = 4096
KV_CACHE_BYTES = 1 << 30


def main() -> None:
    # vLLM and its processes log to stdout, which belongs to the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams  # not above: its processes import this module again

    llm = LLM(
        sys.argv[1],
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
    )
    one_token = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        prompt = {"prompt_token_ids": json.loads(line)}
        started_s = time.perf_counter()
        [output] = llm.generate(prompt, one_token, use_tqdm=False)
        elapsed_s = time.perf_counter() - started_s
        if len(output.outputs[0].token_ids) != 1:
            sys.exit(f"expected one token, got {output.outputs[0].token_ids}")
        print(json.dumps(elapsed_s), file=answers)


if __name__ == "__main__":
    main()
