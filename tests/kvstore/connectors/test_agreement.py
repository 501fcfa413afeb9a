"""What an engine and its pool must agree on is refused by name; a pool that is not there is waited for."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvstore.connectors.vllm
from kvstore.client.client import KVCachePool
from kvstore.connectors.vllm import check_version
from kvstore.connectors.vllm.adapters import Adapters
from kvstore.connectors.vllm.engine_kv import EngineKV
from kvstore.connectors.vllm.link import PoolLink
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.connectors.vllm.worker.page_order import page_order
from mooncake.errors import ConfigError, MismatchError, PoolError
from mooncake.messages.blocks import KVLayout
from mooncake.model.checkpoint import open_checkpoint
from tests.cluster.harness import eventually
from tests.deadline import DEADLINE_S
from tests.kvstore.connectors.engine import transposed_keys
from tests.kvstore.pools import Pool, Pools, wait_until_listening
from tests.tiny_models import tiny_model

PAGE_TOKENS = 32


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("qwen3", directory)
    return directory


def configs(model: Path, **changes: Any) -> tuple[Any, Any]:
    """What vLLM's configuration of `tiny_model` says, with changes."""
    spec = FullAttentionSpec(num_kv_heads=2, head_size=32, block_size=PAGE_TOKENS, dtype=torch.float32)
    values: dict[str, Any] = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "quantization": None,
        "hf_overrides": {},
        "load_format": "auto",
        "cache_dtype": "auto",
        "revision": None,
        "dtype": torch.float32,
        "specs": [spec],
        "layer_names": [f"model.layers.{number}.self_attn.attn" for number in (3, 1, 0, 2)],
        **changes,
    }
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tensor_parallel_size"],
            pipeline_parallel_size=values["pipeline_parallel_size"],
        ),
        model_config=SimpleNamespace(
            model=values.get("hub_id", str(model)),
            **{name: values[name] for name in ("quantization", "hf_overrides", "revision", "dtype")},
        ),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"]),
    )
    groups = [
        SimpleNamespace(kv_cache_spec=each, layer_names=values["layer_names"]) for each in values["specs"]
    ]
    return vllm_config, SimpleNamespace(kv_cache_groups=groups)


@pytest.fixture
def engine(model: Path) -> EngineKV:
    return EngineKV.of(*configs(model))


def test_an_engine_has_the_identity_of_a_worker(model: Path, engine: EngineKV) -> None:
    assert engine.fingerprint(32) == open_checkpoint(str(model)).fingerprint("float32", 32)
    assert engine.layout(16) == KVLayout(4, 2, 32, 16, "float32")
    assert engine.layer_names[0] == "model.layers.0.self_attn.attn"
    other = EngineKV.of(*configs(model, hf_overrides={"rope_theta": 5.0}))
    assert other.fingerprint(32) != engine.fingerprint(32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"quantization": "awq"}, "quantization awq"),
        ({"load_format": "dummy"}, "load_format dummy"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16"),
        ({"hub_id": "some/model", "revision": "v2"}, "revision v2"),
        ({"hf_overrides": print}, "hf_overrides"),
        ({"specs": [SlidingWindowSpec()]}, "SlidingWindowSpec"),
        ({"specs": [FullAttentionSpec(), FullAttentionSpec()]}, "FullAttentionSpec, FullAttentionSpec"),
        (
            {
                "specs": [
                    FullAttentionSpec(num_kv_heads=2, head_size=32, block_size=8, dtype=torch.float8_e5m2)
                ]
            },
            "float8_e5m2",
        ),
    ],
)
def test_what_blocks_cannot_hold_is_refused_by_name(model: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineKV.of(*configs(model, **changes))


def test_a_layer_more_than_the_checkpoint_has_is_refused(model: Path) -> None:
    names = [f"model.layers.{number}.self_attn.attn" for number in range(5)]
    with pytest.raises(MismatchError, match=r"num_layers differs: ours is 4, theirs is 5"):
        EngineKV.of(*configs(model, layer_names=names))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "pool is missing"),
        ({"pool": ""}, "pool is missing"),
        ({"pol": "unix:/x"}, "unknown key pol; did you mean pool"),
        ({"pool": "unix:/x", "keyfile": "k"}, "unknown key keyfile; did you mean key_file"),
        ({"pool": 5}, "pool: Expected"),
        ({"pool": "unix:/x", "block_size": "32"}, "block_size: Expected `int"),
        ({"pool": "unix:/x", "block_size": 0}, "block_size: Expected `int` >= 1"),
        ({"pool": "/x"}, "a pool's address is"),
        ({"pool": "tcp://host:7000"}, "key_file="),
        ({"pool": "tcp://host:7000", "key_file": "/nowhere"}, "/nowhere"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config.*{message}"):
        ConnectorSettings.of(given)


def test_only_the_version_that_it_is_made_for_is_served() -> None:
    check_version("0.32.0")
    check_version("0.32.1+cpu")
    for other in ("0.31.2", "0.33.0rc1", "1.32"):
        with pytest.raises(MismatchError, match=rf"version of vLLM.*0.32.*{other}"):
            check_version(other)
    with pytest.raises(MismatchError, match="theirs is none"):
        kvstore.connectors.vllm.MooncakeServeConnector  # noqa: B018


# -- pools --------------------------------------------------------------------------------------------


@pytest.fixture
def pools(short_tmp_path: Path) -> Iterator[Pools]:
    with Pools(short_tmp_path) as pools:
        yield pools


def new_pool(pools: Pools, engine: EngineKV) -> Pool:
    """A messenger that has no layout yet."""
    pool = Pool(pools.folder, "a", 16, engine.layout(PAGE_TOKENS), 0)
    pools._started.callback(pool.close)
    return pool


def joined(pool: Pool, engine: EngineKV, **settings: Any) -> PoolLink:
    return PoolLink(ConnectorSettings(pool.unix, **settings), engine, speaks=True)


def test_a_new_pool_takes_the_layout_of_the_first_engine(pools: Pools, engine: EngineKV) -> None:
    pool = new_pool(pools, engine)
    pool.start()
    pool_is_there(pool)
    with contextlib.closing(joined(pool, engine, block_size=16)) as link:
        assert link.pool is not None
        assert link.pool.layout == engine.layout(16)
    with contextlib.closing(joined(pool, engine)) as link:
        assert link.pool is not None
        assert link.pool.layout == engine.layout(16)
    with pytest.raises(MismatchError, match="block size differs: ours is 32, theirs is 16"):
        joined(pool, engine, block_size=32)


def pool_is_there(pool: Pool) -> None:
    """Wait until the messenger accepts connections: a socket's file is there a moment before that."""
    wait_until_listening(pool.unix)


def test_another_model_is_refused_by_name(pools: Pools, engine: EngineKV, model: Path) -> None:
    pool = new_pool(pools, engine)
    pool.start()
    pool_is_there(pool)
    joined(pool, engine).close()
    other = EngineKV.of(*configs(model, hf_overrides={"rope_theta": 5.0}))
    with pytest.raises(MismatchError, match="model fingerprint differs"):
        joined(pool, other)
    half = FullAttentionSpec(num_kv_heads=2, head_size=32, block_size=PAGE_TOKENS, dtype=torch.bfloat16)
    with pytest.raises(MismatchError, match="dtype differs: ours is bfloat16, theirs is float32"):
        joined(pool, EngineKV.of(*configs(model, specs=[half])))


def test_pages_and_blocks_consist_of_one_another(engine: EngineKV) -> None:
    for block_size in (8, 32, 96):
        engine.check_block_size(block_size)
    with pytest.raises(MismatchError, match="block size differs: ours is 32 tokens"):
        engine.check_block_size(48)


def test_a_pool_that_comes_later_is_used(
    pools: Pools, engine: EngineKV, caplog: pytest.LogCaptureFixture
) -> None:
    pool = new_pool(pools, engine)
    with caplog.at_level(logging.WARNING), contextlib.closing(joined(pool, engine)) as link:
        assert link.pool is None
        [said] = [record.message for record in caplog.records if "without the KVCache pool" in record.message]
        assert pool.unix in said
        pool.start()
        joining = next(thread for thread in threading.enumerate() if thread.name == "mooncake-join")
        joining.join(DEADLINE_S)
        assert link.pool is not None
        assert any("is used from now on" in record.message for record in caplog.records)


def test_a_pool_that_begins_anew_is_used_by_engines_that_had_joined_the_one_before(
    pools: Pools, engine: EngineKV
) -> None:
    before, anew = new_pool(pools, engine), new_pool(pools, engine)
    before.start()
    pool_is_there(before)
    joined(before, engine).close()
    with contextlib.closing(joined(before, engine)) as link:
        assert link.pool is not None
        before.kill()
        anew.start()
        pool_is_there(anew)

        def answers() -> bool:
            assert link.pool is not None
            try:
                return link.pool.prefix_len([b"k" * 16]) == 0
            except PoolError:
                return False

        eventually(answers, "the engine has joined")
        with KVCachePool.connect(anew.unix, timeout_s=DEADLINE_S) as other:
            assert other.layout == link.pool.layout


# -- pages --------------------------------------------------------------------------------------------


class _Backend:
    """An attention backend that keeps keys transposed, or whatever `write` does."""

    def do_kv_cache_update(
        self, layer: object, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        flat = pages.view(pages.shape[0], pages.shape[1], -1)
        num_tokens = pages.shape[2]
        for slot, each_key, each_value in zip(slots.tolist(), key, value, strict=True):
            page, place = divmod(slot, num_tokens)
            half = flat.shape[2] // 2
            flat[page, :, :half].view(pages.shape[1], -1, num_tokens)[:, :, place] = each_key
            flat[page, :, half:].view(pages.shape[1], num_tokens, -1)[:, place] = each_value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_a_page_is_found_by_writing(dtype: torch.dtype) -> None:
    layout = KVLayout(1, 3, 64, 128, "float32")
    found = page_order(SimpleNamespace(impl=_Backend()), torch.zeros(2, 3, 128, 128, dtype=dtype))
    assert (found == transposed_keys(layout, 128)).all()


def test_pages_that_are_no_reordering_are_refused() -> None:
    layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=lambda *arguments: None))
    with pytest.raises(ConfigError, match="SimpleNamespace keeps keys and values otherwise"):
        page_order(layer, torch.zeros(2, 3, 32, 64))


# -- adapters -----------------------------------------------------------------------------------------


def adapter(number: int, path: Path, *, load_inplace: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_path=str(path), load_inplace=load_inplace)


def test_adapters_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    for name, weights in (("a", b"1"), ("b", b"2"), ("same-as-a", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
    adapters = Adapters()
    assert adapters.digest(None) == ""
    first, second, third = (
        adapters.digest(adapter(number, tmp_path / name))
        for number, name in enumerate(("a", "b", "same-as-a"), 1)
    )
    assert first
    assert first == third != second
    assert adapters.digest(adapter(4, tmp_path / "nowhere")) is None
    assert adapters.digest(adapter(1, tmp_path / "b", load_inplace=True)) is None
    assert adapters.digest(adapter(1, tmp_path / "b")) is None
