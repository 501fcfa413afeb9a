"""Mistakes that are told before any process starts."""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mooncake.cli import commands, preflight
from mooncake.cli.model_trial import try_programs
from mooncake.cli.preflight import check_node
from mooncake.config.settings import load_config
from mooncake.errors import ConfigError, ModelError
from tests.tiny_config import CONFIG
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_tiny_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({"lm_head.weight": torch.ones(512, 64)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def check(model: Path, role: str = "all") -> None:
    check_node(load_config(None, {}, {("model",): str(model), ("role",): role, ("http", "port"): "0"}))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (("worker", "device"), "cuda:1", r"worker\.device: cuda:1 was asked for, .* no CUDA driver"),
        (
            ("kvcache", "pool_bytes"),
            "4096",
            r"kvcache\.pool_bytes: 4096 bytes cannot hold a block of 16384 bytes",
        ),
    ],
)
def test_what_no_worker_or_messenger_could_use_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, str], value: str, reason: str
) -> None:
    def no_driver(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(preflight.ctypes, "CDLL", no_driver)
    flags = {("model",): str(model), ("http", "port"): "0", key: value}
    with pytest.raises(ConfigError, match=reason):
        check_node(load_config(None, {}, flags))
    check_node(load_config(None, {}, {**flags, ("role",): "conductor"}))


def test_certificates_of_messengers_that_cannot_be_read_are_told(model: Path) -> None:
    files = {("security", name): str(model / name) for name in ("tls_cert", "tls_key", "tls_ca")}
    with pytest.raises(ConfigError, match=r"security\.tls_cert .* with tls_key .* cannot be used"):
        check_node(load_config(None, {}, {("model",): str(model), ("http", "port"): "0", **files}))


def test_a_model_that_is_whole_passes(model: Path) -> None:
    check(model)


@pytest.mark.parametrize("role", ["all", "conductor", "front"])
def test_a_tokenizer_is_needed_where_texts_are_read(model: Path, role: str) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer; put tokenizer\.json beside config\.json"):
        check(model, role)
    check(model, "prefill")


def test_a_gguf_file_needs_a_tokenizer_that_can_be_rebuilt(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer model None is not supported"):
        check(write_tiny_gguf(tmp_path / "m.gguf"))
    keys = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "gpt-2"}
    check(write_tiny_gguf(tmp_path / "m.gguf", **keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("api_keys_file",), "cannot read the API keys .*nothing: No such file or directory; make the first"),
        (("admin_keys_file",), "cannot read the API keys .*nothing: No such file"),
        (("tls_cert", "tls_key"), "http.tls_cert .*nothing and http.tls_key .*nothing cannot be used"),
    ],
)
def test_keys_and_certificates_of_the_api_are_read_by_who_has_an_api(
    model: Path, tmp_path: Path, keys: tuple[str, ...], message: str
) -> None:
    named = {("http", key): str(tmp_path / "nothing") for key in keys}
    for role in ("all", "conductor", "front", "prefill"):
        flags = {("model",): str(model), ("role",): role, ("http", "port"): "0", **named}
        with nullcontext() if role == "prefill" else pytest.raises(ConfigError, match=message):
            check_node(load_config(None, {}, flags))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{% set ns = namespace(x='aa') %}{% for _ in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
)
def test_a_chat_template_that_makes_gigabytes_is_refused(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=f"{model}: its chat template takes more than 10 s"):
        check(model)


def test_a_chat_template_without_end_is_refused() -> None:
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ModelError, match="its chat template takes more than 1 s"):
        try_programs([template], tokenizer=None, max_cpu_s=1)


def test_programs_that_cannot_be_tried_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="the process that tries its programs ended with 1 at once"):
        try_programs(["Hello"], tokenizer=None)


@pytest.mark.parametrize(
    "replaced",
    [{"Regex": "."}, {"String": ""}],
)
def test_a_tokenizer_that_makes_gigabytes_of_a_text_is_refused(model: Path, replaced: dict[str, str]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tenfold = {"type": "Replace", "pattern": replaced, "content": "x" * 10}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [tenfold] * 9}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=f"{model}: its tokenizer takes more than 10 s"):
        check(model)


def test_a_tokenizer_that_makes_gigabytes_of_a_token_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "try_programs", partial(try_programs, max_cpu_s=2))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tenfold = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tenfold] * 9}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=f"{model}: its tokenizer takes more than 2 s"):
        check(model)


def test_what_a_tokenizer_refuses_is_told_when_it_is_used(model: Path) -> None:
    for damaged in ("{", '{"normalizer": {"type": "Unheard"}}', "[" * 100_000):
        (model / "tokenizer.json").write_text(damaged)
        check(model)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ nothing.at.all }}", "{% if", "{{ 1/0 }}"]
)
def test_what_a_chat_template_refuses_is_told_when_it_is_used(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    check(model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("role", ["all", "conductor", "front", "prefill", "decode"])
def test_every_role_needs_the_model(model: Path, name: str, role: str) -> None:
    (model / name).unlink()
    with pytest.raises(ModelError, match=str(model)):
        check(model, role)


@pytest.mark.parametrize("mistake", ["port", "model", "tokenizer"])
def test_no_process_starts_with_a_mistake(
    model: Path,
    taken: int,
    mistake: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(config: object) -> None:
        raise AssertionError

    monkeypatch.setattr(commands, "supervise", start)
    (model / "tokenizer.json").rename(model / ("none" if mistake == "tokenizer" else "tokenizer.json"))
    port = taken if mistake == "port" else 0
    path = model / "nothing" if mistake == "model" else model
    assert commands.run([f"--model={path}", f"--port={port}"]) == commands.WRONG_USE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert (str(port) if mistake == "port" else mistake) in line
