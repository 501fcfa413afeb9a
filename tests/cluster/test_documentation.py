"""README and the pages hold what they promise: their commands are run, in their order.

They are run in folders that look like fresh clones, one for each of two hosts (network namespaces), at the
ports that a page names. A `mooncake-serve` that stays is forked (`tests.cluster.forked`), but for that of
`test_one_machine`. A section that asks port 8000 and starts no server asks the quickstart's; those sections
that go on where its two hosts end share these. The quickstart's sections and README have the default model;
elsewhere a tiny one has its name and as many layers.
`tests.documented` says which blocks are run. `make` is looked up only: it is how these tests were installed.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from mooncake.model.checkpoint import open_checkpoint
from mooncake.model.gguf_file import read_gguf_header
from mooncake.model.gguf_tokenizer import build_tokenizer
from tests.benchmarks.simulator.loads import conversations
from tests.chaos.host_server import supervise_on
from tests.cluster.forked import launch
from tests.cluster.harness import Server
from tests.cluster.namespaces import Host, Unavailable, two_hosts
from tests.deadline import DEADLINE_S
from tests.debian import fetched
from tests.documented import PAGES, QUICKSTART, README, ROOT, Block, anchor, blocks
from tests.forked import Forked
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import CHAT_TEMPLATE

PORT = "8000"
TWO_HOSTS = "two-hosts"
ADDRESSES = {1: "10.0.0.1", 2: "10.0.0.2"}
LONGEST_COMMAND_S = 4 * DEADLINE_S
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3 * LONGEST_COMMAND_S)]

# Of what the pages show, as much as is enough to see that it runs.
SHORTER: dict[str, dict[str, str]] = {
    "benchmarking": {
        "--rates 1,2,3,4 --duration 120": "--rates 1,2 --duration 2",
        "--rates 1,2 --duration 60": "--rates 1,2 --duration 2",
        "--concurrency 32 --duration 20": "--concurrency 2 --duration 2",
        "600/8 --concurrency 2 --num-requests 6": "600/8 --concurrency 2 --num-requests 2",
    },
    "planner": {"--devices 64": "--devices 16", "--devices 16 --ttft": "--devices 8 --ttft"},
    "simulator": {"--num-requests 10000": "--num-requests 200"},
    "tuning": {
        "--devices 8 --gpus": "--devices 2 --gpus",
        "--rates 0.5,1,2,4 --duration 60": "--rates 0.5,1 --duration 5",
    },
}

COMPUTE_LONG = ("planner", "tuning")
"""pages whose commands search and measure for a minute and more, however much of them is left out"""


@dataclass(frozen=True)
class Reader:
    """Somebody who has a clone on each of two hosts and pastes blocks into terminals there.

    `hosts` may be empty if nothing that is pasted needs a network. `model` is None for the default model.
    """

    folder: Path
    run_dir: Path
    hosts: Mapping[int, Host] = field(default_factory=dict)
    model: Path | None = None

    def clone(self, number: int | None) -> Path:
        """What has been cloned and installed on a host, as far as commands look at it."""
        at = self.folder / f"host{number or 1}"
        if not at.exists():
            at.mkdir()
            for name in (".venv", "configs", "docs", "docker"):
                (at / name).symlink_to(ROOT / name)
        return at

    def paste(self, block: Block) -> str:
        """What it prints; it must end with status 0."""
        if block.language == "python":
            command = [sys.executable, "-c", block.text]
        else:
            command = ["bash", "-euo", "pipefail", "-c", self._here(block.text)]
        with self._at(block.host):
            done = subprocess.run(
                command,
                cwd=self.clone(block.host),
                env=self._environment(block.host),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LONGEST_COMMAND_S,
            )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, block: Block) -> Iterator[None]:
        """A terminal in which this runs, until its end is asked for."""
        process = self._start(block)
        try:
            yield
            assert process.poll() is None, block.text
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, block: Block) -> "subprocess.Popen[bytes] | Forked":
        folder, environment = self.clone(block.host), self._environment(block.host)
        [command] = block.commands
        words = shlex.split(self._here(command))
        if words[0] == ".venv/bin/mooncake-serve":
            network = self.hosts[block.host or 1].network if self.hosts else None
            return launch(
                partial(supervise_on, network, None, folder=folder), words[1:], environment, output=1
            )
        if words[0] == "etcd":
            (self.folder / "commands/etcd").symlink_to(fetched("etcd-server", "usr/bin/etcd"))
        with self._at(block.host):
            return subprocess.Popen(words, cwd=folder, env=environment)

    def _at(self, number: int | None) -> contextlib.AbstractContextManager[None]:
        return self.hosts[number or 1].entered() if self.hosts else contextlib.nullcontext()

    def _here(self, text: str) -> str:
        for number, told in ADDRESSES.items():
            if number in self.hosts:
                text = text.replace(told, self.hosts[number].addresses[0])
        return text

    def _environment(self, host: int | None) -> dict[str, str]:
        """Where curl fails if a server answers with an error, and scp copies to the other clone."""
        commands = self.folder / "commands"
        if not commands.exists():
            commands.mkdir()
            told, other = self._here(ADDRESSES[2]), self.clone(2)
            scripts = {
                "curl": 'case $1 in -sf) exec "$CURL" "$@";; *) exec "$CURL" --fail-with-body "$@";; esac\n',
                "scp": f'for last; do :; done\ntest "$last" = {told}:mooncake-serve/ || exit 1\n'
                f'while test $# -gt 1; do test "$1" = -p || cp -p "$1" {other} || exit 1; shift; done\n',
            }
            for name, script in scripts.items():
                (commands / name).write_text(f"#!/bin/sh\n{script}")
                (commands / name).chmod(0o755)
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")},
            "PATH": f"{commands}:{os.environ['PATH']}",
            "CURL": shutil.which("curl") or "curl",
            "XDG_RUNTIME_DIR": str(self.run_dir),
            "XDG_STATE_HOME": str(self.run_dir / f"state-{host or 1}"),
            "OMP_NUM_THREADS": "1",
            "MOONCAKE_KVCACHE_POOL_BYTES": "256MiB",
            "MOONCAKE_KVCACHE_DEVICE_BYTES": "256MiB",
            **({} if self.model is None else {"MOONCAKE_MODEL": str(self.model)}),
        }


def start_command() -> str:
    """What `make serve` runs."""
    [found] = re.findall(r"(?m)^serve: .*\n\t\$\(BIN\)/mooncake-serve (.*)$", (ROOT / "Makefile").read_text())
    return str(found)


@contextlib.contextmanager
def hosts() -> Iterator[dict[int, Host]]:
    with contextlib.ExitStack() as made:
        try:
            pair = made.enter_context(two_hosts())
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield dict(zip(ADDRESSES, pair, strict=True))


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mc-") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes little to load and compute, with the default model's tokens and number of layers."""
    folder = tmp_path_factory.mktemp("model") / "SmolLM2-135M-Instruct"
    heads = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes = {"num_hidden_layers": 30, "max_position_embeddings": 8192, "vocab_size": 49152}
    tiny_model("llama3", folder, **heads, **sizes, tie_word_embeddings=True)
    PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(read_gguf_header(open_checkpoint(None).path)),
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Reader]:
    """Where `make serve` runs in another terminal."""
    with run_directory() as run_dir, hosts() as pair:
        reader = Reader(tmp_path_factory.mktemp("quickstart"), run_dir, pair, small_model)
        serve = Block("", "sh", f".venv/bin/mooncake-serve {start_command()}")
        ready = f"curl -sf --retry 100 --retry-connrefused --retry-delay 1 http://127.0.0.1:{PORT}/ready"
        with reader.running(serve):
            reader.paste(Block("", "sh", ready))
            yield reader


@pytest.fixture(scope="module")
def two_host_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Reader, list[str]]]:
    """Where the quickstart's two hosts go on running, and what their commands have printed."""
    section = [block for block in blocks(QUICKSTART) if anchor(block.section) == TWO_HOSTS]
    with run_directory() as run_dir, hosts() as pair, contextlib.ExitStack() as running:
        reader = Reader(tmp_path_factory.mktemp(TWO_HOSTS), run_dir, pair)
        yield reader, paste_all(reader, section, running)


def paste_all(reader: Reader, section: Iterable[Block], running: contextlib.ExitStack) -> list[str]:
    """What its commands print; its servers run until `running` ends."""
    texts = []
    for block in section:
        assert block.after in (None, TWO_HOSTS)
        if block.needs == "internet":
            _stand_in(block, reader.clone(block.host))
        elif block.is_run and block.is_server:
            running.enter_context(reader.running(block))
        elif block.is_run:
            texts.append(reader.paste(block))
    return texts


def _stand_in(block: Block, folder: Path) -> None:
    """Make a file that the block would fetch: a small trace in Mooncake's format."""
    [name] = re.findall(r"curl -LO \S+/([\w.]+\.jsonl)\n", block.text)
    lines = [
        {
            "timestamp": int(1000 * request.arrival_s),
            "input_length": request.num_input_tokens,
            "output_length": request.num_output_tokens,
            "hash_ids": list(request.hash_ids),
        }
        for request in conversations(200, 20.0, 1)
    ]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_one_machine(run_dir: Path, tmp_path: Path) -> None:
    """Also where no namespaces can be made: at another port."""
    reader = Reader(tmp_path, run_dir)
    read = [*blocks(README), *(block for block in blocks(QUICKSTART) if block.section == "One machine")]
    with Server(*shlex.split(start_command()), run_dir=run_dir) as server:
        texts = [
            reader.paste(replace(block, text=block.text.replace(f":{PORT}", f":{server.port}")))
            for block in read
            if block.is_run
        ]
    assert sum("Paris" in text for text in texts) >= 3
    assert any("data: [DONE]" in text for text in texts)
    assert any("tokens of the prompt were in the KVCache pool" in text for text in texts)
    assert any(re.search(r'mooncake_requests_total\{outcome="finished"\} [1-9]', text) for text in texts)
    assert any("port: 8001" in text for text in texts)


def test_two_hosts(two_host_cluster: tuple[Reader, list[str]]) -> None:
    _, texts = two_host_cluster
    assert '"status":"ready"' in texts[-1]
    assert "Paris" in texts[-1]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.soak] if page.stem in COMPUTE_LONG else [])
        for page in PAGES
        if page not in (README, QUICKSTART) and any(block.is_run for block in blocks(page))
    ],
    ids=lambda page: page.stem,
)
def test_page(page: Path, small_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    shorter = dict(SHORTER.get(page.stem, {}))
    read = []
    for block in blocks(page):
        text = block.text
        for told in [told for told in shorter if told in text]:
            text = text.replace(told, shorter.pop(told))
        read.append(replace(block, text=text))
    assert not shorter, "the page does not say so any more"
    for _, blocks_of_section in itertools.groupby(read, lambda block: block.section):
        section = list(blocks_of_section)
        run = [block for block in section if block.is_run]
        with contextlib.ExitStack() as running:
            if any(block.after for block in run):
                reader, _ = request.getfixturevalue("two_host_cluster")
            elif any(block.is_server for block in run):
                run_dir, pair = running.enter_context(run_directory()), running.enter_context(hosts())
                reader = Reader(tmp_path, run_dir, pair, small_model)
            elif any(f":{PORT}" in block.text or "mooncake-kv" in block.text for block in run):
                quickstart: Reader = request.getfixturevalue("quickstart")
                reader = replace(quickstart, folder=tmp_path)
            else:
                reader = Reader(tmp_path, running.enter_context(run_directory()), model=small_model)
            paste_all(reader, section, running)
