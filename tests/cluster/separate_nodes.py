"""A cluster in which each Conductor, front and instance has a node of its own, with room for long answers.

Owns: how its nodes are started. Does not know: what happens to them.
"""

import contextlib
import tempfile
from pathlib import Path

from mooncake.security.keys import ClusterKey
from tests.cluster.harness import Server
from tests.cluster.slowed import SlowedServer
from tests.cluster.streams import MOST_TOKENS
from tests.cluster.tiny_cluster import ONE_THREAD, TRANSFERS, wait_until_idle
from tests.deadline import DEADLINE_S
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import write_tiny_tokenizer

INSTANCES = {"p0": "prefill", "d0": "decode", "d1": "decode"}
"""The instances with their roles."""
_POOL_MIB, _PAGE_BYTES = 128, 8 * 4 * 1 * 2 * 16 * 4


class SeparateNodes:
    """A starter of nodes, which end with `stack`. The model and the cluster key are in `folder`."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, *flags: str) -> None:
        """Write the model and the cluster key. All nodes get `flags`."""
        model, key = folder / "tiny", folder / "key"
        tiny_model("smollm2", model, max_position_embeddings=2 * MOST_TOKENS)
        write_tiny_tokenizer(model)
        ClusterKey.generate().save(key)
        self._stack = stack
        self._flags = [f"--model={model}", f"--security-key-file={key}", TRANSFERS, ONE_THREAD, *flags]
        self._flags += [f"--kvcache-{pool}-bytes={_POOL_MIB}MiB" for pool in ("pool", "device")]
        self._flags += ["--kvcache-block-size=8", "--conductor-reply-endpoint=tcp://127.0.0.1:*"]
        # A busy machine is not silent for so long, and workers have started again by then.
        self._flags += ["--conductor-peer-timeout-s=20", f"--conductor-placement-timeout-s={DEADLINE_S}"]

    def start(self, role: str, *flags: str, until: str = "^ready in") -> Server:
        run_dir = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mc-")))
        return self._stack.enter_context(
            SlowedServer(f"--role={role}", *self._flags, *flags, run_dir=run_dir, until=until)
        )

    def start_instances(self) -> dict[str, Server]:
        return {name: self.start(role, f"--instance={name}") for name, role in INSTANCES.items()}


def wait_until_instances_idle(conductor: Server) -> None:
    """Wait until no instance has a request, or pages or leases for one."""
    wait_until_idle(conductor, num_pages=(_POOL_MIB << 20) // _PAGE_BYTES, instances=tuple(INSTANCES))
