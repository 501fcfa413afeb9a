"""Transfers between two messenger processes with TLS, and attempts without it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mooncake.config.sections import SecurityConfig
from mooncake.errors import TransferError
from tests.kvstore.nodes import StartNode, prompt_keys, until
from tests.kvstore.test_transfers import ALL_LAYERS, Pair, write_layers

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]


class Authority:
    """Signs certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._run("req", "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", f"/CN={name}", "-nodes")

    def certify(self, node: str) -> SecurityConfig:
        self._run(
            "req", "-new", "-keyout", f"{node}.key", "-out", f"{node}.csr", "-subj", f"/CN={node}", "-nodes"
        )
        signed = ("-in", f"{node}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        self._run("x509", "-req", *signed, "-out", f"{node}.pem")
        return SecurityConfig(
            tls_cert=self._path(f"{node}.pem"), tls_key=self._path(f"{node}.key"), tls_ca=self._path("ca.pem")
        )

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._name}-{name}"

    def _run(self, *arguments: str) -> None:
        """Names of files become those of this authority."""
        command = [
            str(self._path(word)) if word.endswith((".key", ".pem", ".csr")) else word for word in arguments
        ]
        options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"] if arguments[0] == "req" else []
        subprocess.run(["openssl", *command, *options], check=True, capture_output=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def _pair(start_node: StartNode, prefill: SecurityConfig, decode: SecurityConfig) -> Pair:
    nodes = []
    for name, security in (("prefill", prefill), ("decode", decode)):
        node = start_node(name, transport="tcp")
        node.kill()
        node.security = security
        node.start()
        nodes.append(node)
    return Pair(nodes[0], nodes[1], await nodes[0].connect(), await nodes[1].connect())


async def test_blocks_travel_encrypted(start_node: StartNode, authority: Authority) -> None:
    nodes = await _pair(start_node, authority.certify("prefill"), authority.certify("decode"))
    await nodes.assert_works()
    await nodes.prefill.close()
    await nodes.decode.close()


@pytest.mark.parametrize("sender", ["without TLS", "of another authority"])
async def test_who_has_no_certificate_of_the_cluster_is_a_stranger(
    start_node: StartNode, authority: Authority, tmp_path: Path, sender: str
) -> None:
    security = SecurityConfig()
    if sender == "of another authority":
        security = Authority(tmp_path, "theirs").certify("prefill")
    nodes = await _pair(start_node, security, authority.certify("decode"))
    keys = prompt_keys(1)
    source, _, _ = await nodes.begin(keys)
    await write_layers(nodes.prefill, source, keys, ALL_LAYERS)
    with pytest.raises(TransferError, match="cannot reach messenger decode"):
        await nodes.prefill.wait_sent(source.reservation_id)
    await until(nodes.decode, lambda stats: stats.num_unauthenticated > 0)
    await nodes.prefill.close()
    await nodes.decode.close()
