"""The cluster's key: its file, its text, what is derived from it, and the command that makes it."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.errors import ConfigError
from mooncake.security.keys import SECRET_BYTES, TEXT_PREFIX, ClusterKey, hkdf_sha256
from tests.deadline import DEADLINE_S

KEY = ClusterKey(bytes(range(SECRET_BYTES)))


def test_key_survives_its_text_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    key = ClusterKey.generate()
    key.save(path)
    assert ClusterKey.load(path) == key
    assert ClusterKey.from_text(key.to_text()) == key
    assert path.read_text().count("\n") == 1
    assert ClusterKey.generate() != key


@pytest.mark.parametrize("umask", [0, 0o077])
def test_saved_key_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        KEY.save(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    KEY.save(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod 600 {path}"):
        ClusterKey.load(path)
    path.chmod(0o400)
    assert ClusterKey.load(path) == KEY


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of root")
@pytest.mark.parametrize("mode", [0o400, 0o440, 0o640])
def test_key_of_root_may_be_its_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    path = tmp_path / "key"
    KEY.save(path)
    path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert ClusterKey.load(path) == KEY
    for more in (0o020, 0o010, 0o004):
        path.chmod(mode | more)
        with pytest.raises(ConfigError, match="others than its owner"):
            ClusterKey.load(path)


def test_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"mooncake-serve keygen {tmp_path}/key"):
        ClusterKey.load(tmp_path / "key")


def test_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    KEY.save(path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for existing in (path, tmp_path / "link"):
        with pytest.raises(ConfigError, match=f"{existing} exists"):
            ClusterKey.generate().save(existing)
    assert ClusterKey.load(path) == KEY
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match="cannot write the cluster key"):
        KEY.save(tmp_path / "missing" / "key")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        random.Random(1).randbytes(100_000),
        b"-----BEGIN PRIVATE KEY-----\n",
        TEXT_PREFIX.encode(),
        KEY.to_text().encode()[:-5],
        KEY.to_text().encode()[:-4] + b"!!!=",
        KEY.to_text().replace("-1:", "-2:").encode(),
        KEY.to_text().encode() * 2,
    ],
)
def test_file_that_is_no_key_is_refused_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{path} holds no cluster key: ") as error:
        ClusterKey.load(path)
    assert KEY.to_text()[-20:-8] not in str(error.value)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=f"{path} is no file"):
            ClusterKey.load(path)


def test_repr_names_the_key_without_showing_it() -> None:
    assert KEY.key_id in repr(KEY)
    assert KEY.to_text() not in repr(KEY)
    assert repr(KEY.secret) not in repr(KEY)
    assert ClusterKey.generate().key_id != KEY.key_id


def test_derivation_is_that_of_rfc_5869() -> None:
    """Its test case 1, of which the first 32 bytes."""
    derived = hkdf_sha256(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert derived.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_everything_that_is_derived_differs() -> None:
    public, secret = KEY.curve_pair()
    proofs = {
        KEY.proof(b"a"),
        KEY.proof(b"b"),
        KEY.proof(b"a", b""),
        KEY.proof(b"a", b"bc"),
        KEY.proof(b"a", b"b", b"c"),
        KEY.proof(b"ab", b"c"),
        KEY.proof(b"a", b"bc", b""),
        ClusterKey.generate().proof(b"a"),
    }
    assert len(proofs) == 8
    assert {len(proof) for proof in proofs} == {32}
    assert len({public, secret, ClusterKey.generate().curve_pair()[1]}) == 3
    assert KEY.proof(b"a", b"bc") == ClusterKey(KEY.secret).proof(b"a", b"bc")
    assert KEY.curve_pair() == ClusterKey(KEY.secret).curve_pair()


def keygen(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-m", "mooncake", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_keygen_makes_a_key_and_says_what_to_do_with_it(tmp_path: Path) -> None:
    result = keygen("keygen", "cluster.key", folder=tmp_path)
    key = ClusterKey.load(tmp_path / "cluster.key")
    assert result.returncode == 0
    assert f"{tmp_path}/cluster.key" in result.stdout
    assert key.key_id in result.stdout
    assert "--security-key-file cluster.key" in result.stdout
    assert key.to_text() not in result.stdout
    again = keygen("keygen", "cluster.key", folder=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith("error: cluster.key exists")
    assert ClusterKey.load(tmp_path / "cluster.key") == key


def test_keygen_writes_to_stdout_when_asked(tmp_path: Path) -> None:
    result = keygen("keygen", "-", folder=tmp_path)
    assert result.stdout.count("\n") == 1
    assert ClusterKey.from_text(result.stdout).to_text() == result.stdout.strip()
    assert list(tmp_path.iterdir()) == []


def test_keygen_refuses_what_it_would_ignore(tmp_path: Path) -> None:
    result = keygen("--port", "8001", "keygen", "cluster.key", folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "error: keygen takes FILE and no other options\n"
    assert keygen("keygen", folder=tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []
