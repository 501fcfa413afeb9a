"""The file of API keys: made by the command, edited by people."""

import stat
from pathlib import Path

import pytest

from mooncake.cli import commands
from mooncake.errors import ConfigError
from mooncake.security.api_keys import add_api_key, digest, load_api_keys


def test_added_keys_are_found_by_their_digests_and_are_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = add_api_key(path, "alice", {})
    path.write_text(path.read_text().rstrip("\n"))  # as some editors leave it
    second = add_api_key(path, "bob", {"requests_per_minute": 90, "max_concurrent": 4})
    keys = load_api_keys(path)
    assert keys[digest(first)].name == "alice"
    bob = keys[digest(second)]
    assert (bob.requests_per_minute, bob.max_concurrent) == (90, 4)
    assert len({first, second, keys[digest(first)].salt, bob.salt}) == 4
    assert not {first, second} & set(path.read_text().split())
    assert first.removeprefix("mck-") not in path.read_text()
    assert path.read_text().startswith("# API keys")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "YAML"),
        ("a: 1", "list"),
        ("- name: a\n", "sha256"),
        (f"- {{name: a, sha256: {'0a' * 32}, limit: 3}}\n", "limit"),
        (f"- {{name: a b, sha256: {'0a' * 32}}}\n", "name"),
        (f"- {{name: a, sha256: {'0a' * 32}, max_concurrent: 0}}\n", "max_concurrent"),
        (f"- {{name: a, sha256: {'0b' * 32}}}\n- {{name: a, sha256: {'0a' * 32}}}\n", "same name"),
        (f"- {{name: a, sha256: {'fa' * 32}}}\n- {{name: b, sha256: {'fa' * 32}}}\n", "same sha256"),
    ],
)
def test_a_wrong_file_names_what_is_wrong(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_api_keys(path)
    with pytest.raises(ConfigError, match=reason):
        add_api_key(path, "new", {})
    assert path.read_text() == text


def test_an_empty_file_has_no_keys_and_a_missing_one_says_how_to_make_it(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nobody\n")
    assert load_api_keys(tmp_path / "empty") == {}
    with pytest.raises(ConfigError, match="mooncake-serve apikey"):
        load_api_keys(tmp_path / "missing")


def test_keys_of_a_group_share_their_cache(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    entries = [f"- {{name: k{i}, sha256: {'ab'[i] * 64}, cache_group: team}}\n" for i in range(2)]
    path.write_text("".join(entries))
    assert len({key.salt for key in load_api_keys(path).values()}) == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys")
    assert commands.run(["apikey", path, "alice", "--requests-per-minute", "60"]) == 0
    key = capsys.readouterr().out.strip()
    assert load_api_keys(Path(path))[digest(key)].requests_per_minute == 60
    for arguments in (
        ("apikey", path, "alice"),
        ("--port", "1", "apikey", path, "bob"),
        ("apikey", path, "a b"),
    ):
        assert commands.run(arguments) == 2
    assert len(load_api_keys(Path(path))) == 1
