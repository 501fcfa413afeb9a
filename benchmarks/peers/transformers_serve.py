"""A peer: `transformers serve` with continuous batching, in the version that is installed here.

It computes with our own torch, in a virtual environment that adds the requirements of its server.

Owns: installing, settings, how its server is started and used. Does not know: the comparison.
"""

import importlib.metadata
import json
import os
import random
import re
import sys
import sysconfig
from pathlib import Path

import httpx
from tokenizers import Tokenizer

from benchmarks.kvstore.rounds import progress
from benchmarks.peers.hf_directory import hf_directory
from benchmarks.peers.installing import run
from benchmarks.serving import timed
from mooncake.model.checkpoint import open_checkpoint

PACKAGE = f"transformers[serving]=={importlib.metadata.version('transformers')}"
_A_WORD = re.compile("Ġ[a-z]{2,}")
"""The pattern of a token that is a space and a word."""
_MEMORY_SHARE = 0.1
"""The share of the machine's free memory for KVCache.

By default the server takes most of the memory, but other servers need some.
"""
_NOT_INHERITED = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "VIRTUAL_ENV")


class TransformersServe:
    """An installation of `transformers serve` in a peer's directory, with the default model."""

    def __init__(self, home: Path, cores: str) -> None:
        """Set up an installation in `home` that computes on `cores`, given like `0` or `0-1`."""
        self._home, self._cores = home.absolute(), cores
        self._venv = self._home / "transformers"
        self._python = str(self._venv / "bin" / "python")

    @property
    def model(self) -> Path:
        """The default model as a Hugging Face directory, written on first use."""
        return hf_directory(open_checkpoint(None), self._home / "models")

    def install(self) -> None:
        """Install the package if it is not installed yet. Raises PeerError."""
        marker = self._venv / "installed"
        if marker.exists() and marker.read_text() == PACKAGE:
            return
        progress(f"installing {PACKAGE} into {self._venv}")
        self._run(sys.executable, "-m", "venv", "--clear", str(self._venv))
        packages = self._run(self._python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(packages.strip()) / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self._run(self._python, "-m", "pip", "install", "--quiet", PACKAGE)
        marker.write_text(PACKAGE)

    def _run(self, *command: str) -> str:
        return run(PACKAGE, list(command), self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the server's processes."""
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        return {**kept, "HF_HUB_OFFLINE": "1"}

    def serve_command(self, port: int) -> list[str]:
        """Return the command that starts the server on loopback."""
        return [
            *("taskset", "--cpu-list", self._cores),
            *(self._python, "-m", "transformers.cli.transformers", "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--device", "cpu", "--dtype", "bfloat16", "--continuous-batching"),
            *("--cb-max-memory-percent", str(_MEMORY_SHARE)),
        ]

    def client(self, url: str) -> "TextClient":
        """Return a client for the server at `url`."""
        return TextClient(url, self.model)


class TextClient:
    """A client that sends prompts of random words.

    The server takes only text. Each word is one token.
    """

    def __init__(self, url: str, model: Path) -> None:
        self._http = httpx.Client(base_url=url, timeout=300, limits=httpx.Limits(max_connections=64))
        self._model = str(model)
        vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
        self._words = sorted(token.replace("Ġ", " ") for token in vocabulary if _A_WORD.fullmatch(token))
        self._rng = random.Random(0)

    def close(self) -> None:
        self._http.close()

    def complete(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Stream one answer, and return its TTFT in seconds."""
        generation = {"max_new_tokens": num_output_tokens, "do_sample": False, "eos_token_id": None}
        body = {
            "model": self._model,
            "prompt": "".join(self._rng.choice(self._words) for _ in range(num_prompt_tokens)),
            "generation_config": json.dumps(generation),
            "stream": True,
        }
        return timed(self._http, body, num_output_tokens, lambda event: _num_tokens(event, num_prompt_tokens))


def _num_tokens(event: dict[str, dict[str, int]], num_prompt_tokens: int) -> int:
    """Return the number of output tokens that the last event reports; 0 for other events."""
    usage = event.get("usage")
    if usage is None:
        return 0
    if usage["prompt_tokens"] != num_prompt_tokens:
        raise RuntimeError(f"expected a prompt of {num_prompt_tokens} tokens, got {usage['prompt_tokens']}")
    return usage["completion_tokens"]
