"""docs/configuration.md is what the configuration's models make."""

from pathlib import Path

from mooncake.cli.config_reference import page
from mooncake.config.settings import leaf_keys

PAGE = Path(__file__).parents[3] / "docs/configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run make generate"


def test_every_key_is_there_once_with_what_it_takes() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    keys = [row.split("`")[1] for row in rows]
    assert sorted(keys) == sorted(".".join(path) for path in leaf_keys())
    for row in rows:
        _, key, values, _, meaning, _ = row.replace("\\|", "").split("|")
        assert values.strip(), key
        assert meaning.strip(), key
