import argparse

import pytest

from mooncake.cli.command_line import Parser
from mooncake.config.flags import NEEDED_FIRST, add_flags, given_flags, placeholder
from mooncake.config.settings import leaf_keys


def help_of(*, shows_all: bool) -> str:
    parser = Parser(prog="p", usage="p")
    add_flags(parser, shows_all=shows_all)
    return parser.format_help()


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (("model",), "MODEL"),
        (("role",), "ROLE"),
        (("num_prefill",), "N"),
        (("hang_timeout_s",), "SECONDS"),
        (("http", "port"), "PORT"),
        (("http", "tls_cert"), "FILE"),
        (("http", "admin_listen"), "HOST:PORT"),
        (("kvcache", "pool_bytes"), "BYTES"),
        (("kvcache", "segment_dir"), "DIR"),
        (("kvcache", "ssd_dirs"), "DIR,..."),
        (("conductor", "endpoint"), "ENDPOINT"),
        (("conductor", "replicate"), "true|false"),
        (("conductor", "slo_classes"), "JSON"),
        (("conductor", "kvcache_balancing_threshold"), "X"),
        (("worker", "num_threads"), "N"),
    ],
)
def test_placeholders_say_what_a_value_is(key: tuple[str, ...], expected: str) -> None:
    assert placeholder(key) == expected


def test_flags_that_people_need_first_are_few_and_the_rest_is_shown_on_demand() -> None:
    keys = set(leaf_keys())
    assert keys >= NEEDED_FIRST
    short, long = help_of(shows_all=False), help_of(shows_all=True)
    assert short.count("\n  --") == len(NEEDED_FIRST)
    assert long.count("\n  --") == len(keys)
    assert "--kvcache-ssd-dirs" not in short
    assert "kvcache:\n  Blocks, and the memory" in short
    assert "security:" not in short


def test_only_flags_that_were_given_count() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, shows_all=False)
    options = parser.parse_args(["--port", "1", "--kvcache-ssd-dirs", "a,b"])
    assert given_flags(options) == {("http", "port"): "1", ("kvcache", "ssd_dirs"): "a,b"}
