"""A real etcd: leases and keys, logins, certificates, members that do not answer."""

import asyncio
import base64
import shutil
import socket
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from mooncake.config.cluster_section import ClusterConfig
from mooncake.errors import ConfigError
from mooncake.leadership import etcd as etcd_module
from mooncake.leadership.etcd import Etcd, FirstKey, LeaseLostError, RefusedError, UnreachableError
from tests.certificates import self_signed
from tests.deadline import DEADLINE_S
from tests.etcd_server import EtcdServer
from tests.ports import free_port

pytestmark = pytest.mark.cluster


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


async def first_of(etcd: Etcd, prefix: bytes) -> FirstKey:
    async with asyncio.timeout(DEADLINE_S), aclosing(etcd.first(prefix)) as keys:
        return await anext(keys)


async def test_keys_live_as_long_as_their_lease_and_the_oldest_is_the_first(server: EtcdServer) -> None:
    async with Etcd(ClusterConfig(etcd_endpoints=[server.url])) as etcd:
        older, newer = 1, 2
        for lease in (older, newer, newer):
            await etcd.grant(lease, 60)
        await etcd.create(b"/a/2", b"old", older)
        await etcd.create(b"/a/1", b"new", newer)
        await etcd.create(b"/a/2", b"not put again", newer)
        first = await first_of(etcd, b"/a")
        assert (first.key, first.value) == (b"/a/2", b"old")
        await etcd.keep_alive(older)
        await etcd.revoke(older)
        for call in (etcd.keep_alive(older), etcd.revoke(older), etcd.create(b"/a/3", b"", older)):
            with pytest.raises(LeaseLostError):
                await call
        second = await first_of(etcd, b"/a")
        assert (second.key, second.value) == (b"/a/1", b"new")
        assert second.revision > first.revision


async def test_another_member_is_asked_if_one_does_not_answer(server: EtcdServer) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    async with Etcd(ClusterConfig(etcd_endpoints=[nobody, server.url])) as etcd:
        lease = 1
        await etcd.grant(lease, 60)
        await etcd.create(b"/a/1", b"", lease)
        assert (await first_of(etcd, b"/a")).key == b"/a/1"
    async with Etcd(ClusterConfig(etcd_endpoints=[nobody])) as etcd:
        with pytest.raises(UnreachableError, match=nobody):
            await etcd.grant(1, 60)


async def test_a_member_that_is_silent_is_not_asked_again(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_module, "SILENCE_S", 0.05)
    monkeypatch.setattr(etcd_module, "ANSWER_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Etcd(ClusterConfig(etcd_endpoints=[url])) as etcd:
            with pytest.raises(UnreachableError, match=url):
                await anext(etcd.first(b"/a"))
        monkeypatch.setattr(etcd_module, "ANSWER_TIMEOUT_S", DEADLINE_S)
        async with Etcd(ClusterConfig(etcd_endpoints=[server.url])) as etcd:
            with pytest.raises(StopAsyncIteration):  # there is no key, and an answer
                await anext(etcd.first(b"/a"))


async def test_what_is_no_etcd_is_refused(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        async with Etcd(ClusterConfig(etcd_endpoints=[f"http://127.0.0.1:{port}"])) as etcd:
            with pytest.raises(RefusedError, match="is it etcd"):
                await etcd.grant(1, 60)


async def test_a_login_that_is_old_at_once_is_for_later(tmp_path: Path) -> None:
    """As while users or roles change."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        old = b'{"message": "etcdserver: revision of auth store is old", "code": 3}'
        status, body = (b"200 OK", b'{"token": "t"}') if b"/authenticate" in asked else (b"400 Bad", old)
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        writer.close()

    (tmp_path / "password").write_text("shine")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        config = ClusterConfig(
            etcd_endpoints=[f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"],
            etcd_user="moon",
            etcd_password_file=tmp_path / "password",
        )
        async with Etcd(config) as etcd:
            with pytest.raises(UnreachableError, match="revision of auth store is old"):
                await etcd.keep_alive(1)


def enable_logins(url: str) -> None:
    """A user `moon` with the password `shine`, who may use the keys under /moon/."""

    def ask(path: str, **fields: object) -> None:
        httpx.post(f"{url}/v3/auth/{path}", json=fields, timeout=DEADLINE_S).raise_for_status()

    ask("user/add", name="root", password="root")
    ask("role/add", name="root")
    ask("user/grant", user="root", role="root")
    ask("user/add", name="moon", password="shine")
    ask("role/add", name="moon")
    keys = {"key": base64.b64encode(b"/moon/").decode(), "range_end": base64.b64encode(b"/moon0").decode()}
    ask("role/grant", name="moon", perm={"permType": "READWRITE", **keys})
    ask("user/grant", user="moon", role="moon")
    ask("enable")


async def test_logins_are_repeated_when_etcd_has_forgotten_them(server: EtcdServer, tmp_path: Path) -> None:
    enable_logins(server.url)
    (tmp_path / "password").write_text("shine\n")
    config = ClusterConfig(
        etcd_endpoints=[server.url], etcd_user="moon", etcd_password_file=tmp_path / "password"
    )
    async with Etcd(config) as etcd:
        lease = 1
        await etcd.grant(lease, 60)
        await etcd.create(b"/moon/1", b"", lease)
        assert (await first_of(etcd, b"/moon")).key == b"/moon/1"
        with pytest.raises(RefusedError, match="permission denied"):
            await etcd.create(b"/sun/1", b"", lease)
        server.kill()
        server.start()
        await etcd.keep_alive(lease)
        server.kill()
        server.start()
        with pytest.raises(UnreachableError, match="has ended"):
            await anext(etcd.first(b"/moon"))
        assert (await first_of(etcd, b"/moon")).key == b"/moon/1"
    (tmp_path / "password").write_text("rain")
    for wrong in (config, ClusterConfig(etcd_endpoints=[server.url])):
        async with Etcd(wrong) as etcd:
            with pytest.raises(RefusedError, match=r"authentication failed|user name is empty"):
                await etcd.create(b"/moon/1", b"", lease)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_both_sides_show_certificates(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    flags = [f"--cert-file={cert}", f"--key-file={key}", "--client-cert-auth", f"--trusted-ca-file={cert}"]
    with EtcdServer(tmp_path, *flags, scheme="https") as server:
        with_ca = ClusterConfig(etcd_endpoints=[server.url], etcd_ca=cert)
        async with Etcd(with_ca.model_copy(update={"etcd_cert": cert, "etcd_key": key})) as etcd:
            await etcd.grant(1, 60)
            await etcd.create(b"/a/1", b"", 1)
            assert (await first_of(etcd, b"/a")).key == b"/a/1"
        async with Etcd(with_ca) as etcd:
            with pytest.raises(UnreachableError, match=server.url):
                await etcd.grant(1, 60)
        async with Etcd(ClusterConfig(etcd_endpoints=[server.url])) as etcd:
            with pytest.raises(UnreachableError, match="certificate verify failed"):
                await etcd.grant(1, 60)


@pytest.mark.parametrize("name", ["etcd_ca", "etcd_cert", "etcd_password_file"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").touch()
    files = {"etcd_ca": "missing", "etcd_cert": "empty", "etcd_password_file": "missing"}
    given: dict[str, object] = {name: tmp_path / files[name]}
    given |= {"etcd_key": tmp_path / "empty"} if name == "etcd_cert" else {}
    given |= {"etcd_user": "moon"} if name == "etcd_password_file" else {}
    with pytest.raises(ConfigError, match=rf"cluster\.{name} .*{files[name]}"):
        Etcd(ClusterConfig.model_validate({"etcd_endpoints": ["https://h:1"], **given}))
