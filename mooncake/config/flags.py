"""The configuration's keys as flags: `http.port` is `--http-port`, and the usual short names exist too.

Owns: names, placeholders and groups of flags, the choice of flags that --help shows. Does not know: keys and
their values (`mooncake.config.settings`), commands (`mooncake.cli.commands`).
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from mooncake.config.settings import describe, field_of, flag_name, leaf_keys, section_of

Key = tuple[str, ...]

SHORT_NAMES: dict[Key, str] = {
    ("http", "host"): "--host",
    ("http", "port"): "--port",
    ("conductor", "record"): "--record",
}
NEEDED_FIRST: frozenset[Key] = frozenset(
    {
        ("role",),
        ("model",),
        ("served_model_name",),
        ("num_prefill",),
        ("num_decode",),
        ("num_both",),
        ("log_level",),
        ("http", "host"),
        ("http", "port"),
        ("http", "api_keys_file"),
        ("kvcache", "pool_bytes"),
        ("kvcache", "device_bytes"),
        ("conductor", "ttft_slo_s"),
        ("worker", "device"),
    }
)
"""The keys that --help shows; --help-all shows all keys."""

_BY_LAST_WORD = {
    "s": "SECONDS",
    "us": "MICROSECONDS",
    "bytes": "BYTES",
    "tokens": "TOKENS",
    "dir": "DIR",
    "dirs": "DIR,...",
    "instance": "NAME",
    "topology": "JSON",
    "hosts": "HOST,...",
    "origins": "ORIGIN,...",
    "port": "PORT",
    "listen": "HOST:PORT",
    "endpoints": "ENDPOINT,...",
    "events": "ENDPOINT",
    "replay": "ENDPOINT",
}
_BY_TYPE: dict[Any, str] = {Path: "FILE", bool: "true|false", int: "N", float: "X", dict: "JSON"}


def add_flags(parser: argparse.ArgumentParser, *, shows_all: bool) -> None:
    """Add a flag for each key, in the groups of their sections.

    The parsed options have no attribute for a flag that is not given.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for key in leaf_keys():
        is_shown = shows_all or key in NEEDED_FIRST
        section, meaning = section_of(key)
        if is_shown and section not in groups:
            groups[section] = parser.add_argument_group(section, meaning)
        (groups[section] if is_shown else parser).add_argument(
            *([SHORT_NAMES[key]] if key in SHORT_NAMES else []),
            flag_name(key),
            dest="_".join(key),
            default=argparse.SUPPRESS,
            metavar=placeholder(key),
            help=describe(key).replace("%", "%%") if is_shown else argparse.SUPPRESS,
        )


def given_flags(options: argparse.Namespace) -> dict[Key, str]:
    """Return the values of the flags that were given, by key."""
    given = vars(options)
    return {key: given[name] for key in leaf_keys() if (name := "_".join(key)) in given}


def placeholder(key: Key) -> str:
    """Return the placeholder of a key's value in help: FILE, BYTES, HOST:PORT."""
    last_word = key[-1].split("_")[-1]
    if last_word in _BY_LAST_WORD:
        return _BY_LAST_WORD[last_word]
    types = set(_types(field_of(key).annotation))
    return next((text for kind, text in _BY_TYPE.items() if kind in types), last_word.upper())


def _types(annotation: Any) -> Iterator[Any]:
    yield get_origin(annotation) or annotation
    for inner in get_args(annotation):
        yield from _types(inner)
