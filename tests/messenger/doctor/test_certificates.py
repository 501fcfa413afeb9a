"""TLS files of this node."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from messenger.doctor import certificates
from messenger.doctor.findings import Level
from mooncake.config.sections import SecurityConfig
from mooncake.errors import ConfigError
from tests.kvstore.test_tls import Authority
from tests.messenger.doctor.machines import config, only

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture
def node(tmp_path: Path) -> SecurityConfig:
    """Its certificate is good for a month."""
    return Authority(tmp_path, "ours").certify("node")


def level(security: SecurityConfig, now_s: float) -> Level:
    settings = config(security=security.model_dump())
    return only(certificates.tls(settings, lambda: now_s)).level


def test_certificates_are_good_until_they_end(node: SecurityConfig) -> None:
    assert level(SecurityConfig(), time.time()) is Level.OK
    assert level(node, time.time()) is Level.OK
    assert level(node, time.time() + 20 * 86400) is Level.WARN


def test_a_certificate_of_another_authority_is_refused(node: SecurityConfig, tmp_path: Path) -> None:
    other = Authority(tmp_path, "theirs").certify("node")
    with pytest.raises(ConfigError, match=r"tls_cert is not signed by security\.tls_ca, or not good today"):
        level(node.model_copy(update={"tls_ca": other.tls_ca}), time.time())


def test_files_that_cannot_be_used_are_named(node: SecurityConfig, tmp_path: Path) -> None:
    for changed, what in (("tls_cert", "tls_cert .* with tls_key"), ("tls_ca", "tls_ca .* cannot be used")):
        with pytest.raises(ConfigError, match=f"security.{what}"):
            level(node.model_copy(update={changed: tmp_path / "nothing"}), time.time())


def test_a_passphrase_is_not_asked_for(node: SecurityConfig, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(node.tls_key), "-aes256", "-passout", "pass:secret", "-out"]
    subprocess.run([*command, str(locked)], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="has a passphrase"):
        level(node.model_copy(update={"tls_key": locked}), time.time())
