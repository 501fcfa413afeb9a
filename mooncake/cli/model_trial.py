"""A trial run of the programs that a model contains, in a process of its own with limits.

A chat template is such a program. Compiling it, which computes its constants, can take unbounded memory and
time, and so can rendering a greeting: Jinja's sandbox limits neither. A tokenizer's normalization and
decoding are programs too: a few replacements in a row can turn a word into gigabytes.

Owns: this process and its limits. Does not know: where the programs come from, their other errors, which are
reported when a program is used.
"""

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mooncake.errors import ModelError, is_panic

_MAX_CPU_S = 10
_MAX_BYTES = 1 << 30
_DEADLINE_S = 300.0
"""Seconds after which a trial is killed, however little processor time it has used.

A trial takes far less on a busy machine.
"""
_GREETING = [{"role": "user", "content": "Hello"}]
_TEXT = "Hello, you! " * 100
_TEMPLATE = "its chat template takes more than {} for one greeting"
_TOKENIZER = f"its tokenizer takes more than {{}} for a text of {len(_TEXT):,} characters"


def try_programs(templates: Sequence[str], tokenizer: Path | None, max_cpu_s: int = _MAX_CPU_S) -> None:
    """Render a greeting with each template, and encode and decode a text, in a process with limits.

    `tokenizer` is a tokenizer.json that says how the text is encoded and decoded; a missing or damaged file
    is ignored here. Raises ModelError if the programs take more than `max_cpu_s` seconds of processor time,
    or too much memory, or if they cannot be tried.
    """
    if not templates and tokenizer is None:
        return
    command = [sys.executable, "-m", "mooncake.cli.model_trial"]
    told = json.dumps([list(templates), None if tokenizer is None else str(tokenizer), max_cpu_s]).encode()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            begun, _ = process.communicate(told, _DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            begun, _ = process.communicate()
    if process.returncode != 0:
        if not begun:
            raise ModelError(f"the process that tries its programs ended with {process.returncode} at once")
        error = begun.decode().splitlines()[-1]
        raise ModelError(error.format(f"{max_cpu_s} s of computing, or {_MAX_BYTES >> 30} GiB of memory,"))


def main() -> int:
    """Run the trial process. Returns 0 if all programs keep within the limits, even if they fail otherwise.

    Before each step it prints the error that applies if the step does not end.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_BYTES, _MAX_BYTES))
    templates, tokenizer, max_cpu_s = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s))
    try:
        if templates:
            print(_TEMPLATE, flush=True)
            _render(templates)
        if tokenizer is not None:
            print(_TOKENIZER, flush=True)
            _split_and_decode(Path(tokenizer))
    except MemoryError:
        return 1
    return 0


def _render(templates: Sequence[str]) -> None:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The environment of transformers, without parts that take little in any template.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _raise, "strftime_now": str}
    for template in templates:
        with contextlib.suppress(TemplateError, *_REFUSALS):
            environment.from_string(template).render(messages=_GREETING, add_generation_prompt=True)


class _Steps(msgspec.Struct):
    """The steps of a tokenizer.json around the vocabulary.

    They lead from a text to the pieces that are looked up, and from tokens back to a text.
    """

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def _split_and_decode(file: Path) -> None:
    """Normalize, split and decode a text as the tokenizer does.

    The vocabulary is left out, as its cost is bounded by the size of the file.
    """
    from tokenizers import Tokenizer

    try:
        fields = msgspec.json.decode(file.read_bytes(), type=_Steps)
        without_tokens = {
            "model": {"type": "BPE", "vocab": {}, "merges": []},
            "normalizer": fields.normalizer,
            "pre_tokenizer": fields.pre_tokenizer,
            "decoder": fields.decoder,
        }
        tokenizer = Tokenizer.from_str(json.dumps(without_tokens))
        tokenizer.encode(_TEXT)
        if tokenizer.decoder is not None:
            tokenizer.decoder.decode(_TEXT.split())
    except MemoryError:
        raise
    except BaseException as error:  # `tokenizers` raises bare Exception for a damaged file, or panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise


def _raise(message: str) -> None:
    raise ValueError(message)


_REFUSALS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

if __name__ == "__main__":
    sys.exit(main())
