"""Profiles of workers: what is fitted, and what a file may hold."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mooncake.cli import steps
from mooncake.cli.profiling import ProfileError, draw, measure, tables
from mooncake.config.profile import (
    DecodeCosts,
    PrefillCosts,
    Profile,
    load_profile,
    load_profile_of,
)
from mooncake.errors import ConfigError
from mooncake.messages.costs import Costs, ModelShape, Point, fit, prefill_quantities
from mooncake.node.child import Child
from mooncake.node.plan import ChildSpec
from mooncake.node.process import Measured
from tests.mooncake.fake_child import FakeConfig

COSTS = Costs(0.004, 3e-4, 2e-8)
SIZES = [(new, cached) for new in (16, 256, 4096) for cached in (0, 1000, 20_000)]


def points(noise: float = 0.0) -> list[Point]:
    """As if measured, each off by up to `noise`."""
    random = np.random.default_rng(1)
    quantities = [prefill_quantities(new, cached) for new, cached in SIZES]
    factors = 1 + noise * random.uniform(-1, 1, len(quantities))
    return [Point(*of, factor * COSTS.seconds(*of)) for of, factor in zip(quantities, factors, strict=True)]


def test_costs_are_found_again() -> None:
    assert fit(points()) == pytest.approx(COSTS)
    for found, true in zip(fit(points(noise=0.05)), COSTS, strict=True):
        assert found == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("outliers", [[0], [4], [8], [0, 8], [3, 5]])
@pytest.mark.parametrize("factor", [1.5, 3.0, 20.0])
def test_durations_that_something_else_made_longer_hardly_move_the_costs(
    outliers: list[int], factor: float
) -> None:
    measured = points(noise=0.02)
    for index in outliers:
        measured[index] = measured[index]._replace(seconds=factor * measured[index].seconds)
    found = fit(measured)
    for one, (new, cached) in enumerate(SIZES):
        if one not in outliers:
            quantities = prefill_quantities(new, cached)
            assert found.seconds(*quantities) == pytest.approx(COSTS.seconds(*quantities), rel=0.06)


def test_no_cost_is_negative() -> None:
    falling = [Point(1, 1, 2.0), Point(2, 4, 1.9), Point(3, 9, 1.7), Point(4, 16, 1.8)]
    assert min(fit(falling)) >= 0
    assert fit([Point(5, 5, 1.0)]).seconds(5, 5) == pytest.approx(1.0)


def test_a_cached_prefix_costs_only_the_attention_to_it() -> None:
    (new, pairs), (_, pairs_behind) = prefill_quantities(10, 0), prefill_quantities(10, 100)
    assert (new, pairs) == (10, 50)
    assert pairs_behind - pairs == 10 * 100


SHAPE = ModelShape(2, 64, 128, 4, 2, 16, 1000)
PROFILE = Profile(
    model="m",
    shape=SHAPE,
    dtype="float32",
    engine="cpu",
    device="Z80",
    prefill=PrefillCosts(*COSTS),
    decode=DecodeCosts(0.01, 0.001, 1e-7),
    prefill_points=[Point(16, 0, 0.01), Point(64, 0, 0.03), Point(16, 512, 0.02)],
    decode_points=[Point(1, 65, 0.011), Point(2, 130, 0.012)],
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == PROFILE
    assert PROFILE.costs == (COSTS, Costs(0.01, 0.001, 1e-7))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{", "no profile"),
        (b"{}", "missing required field"),
        (b'{"version": 2}', "missing required field"),
        (b'{"version": 1, "model": "m", "dtype": "float32", "engine": "cpu"}', "version 1, not 2"),
        (msgspec.json.encode(msgspec.structs.replace(PROFILE, version=3)), "version 3, not 2"),
        (msgspec.json.encode(msgspec.structs.replace(PROFILE, prefill=PrefillCosts(0, 0, 0))), "all 0"),
        (msgspec.json.encode(msgspec.structs.replace(PROFILE, decode=DecodeCosts(1, -1, 0))), "negative"),
    ],
)
def test_files_that_are_no_profiles_are_refused_by_name(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=word) as caught:
        load_profile(path)
    assert "conductor.profile" in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("model", "shape", "dtype", "words"),
    [
        ("other", SHAPE, "float32", "measured with m in float32, this is other in float32"),
        ("m", SHAPE, "bfloat16", "measured with m in float32, this is m in bfloat16"),
        (
            "m",
            msgspec.structs.replace(SHAPE, num_layers=3),
            "float32",
            "a m of num_layers 2, this is one of num_layers 3",
        ),
    ],
)
def test_a_profile_of_another_model_is_refused(
    tmp_path: Path, model: str, shape: ModelShape, dtype: str, words: str
) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert load_profile_of(tmp_path / "p.json", "m", SHAPE, "float32") == PROFILE
    with pytest.raises(ConfigError, match=f"conductor.profile: .*{words}; measure it anew"):
        load_profile_of(tmp_path / "p.json", model, shape, dtype)


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*p\.json: No such file"):
        load_profile(tmp_path / "p.json")


def test_people_see_measurements_fit_and_errors(tmp_path: Path) -> None:
    prefill, decode = tables(PROFILE)
    assert prefill.row_count == 3
    assert decode.row_count == 2
    assert "300 us for a new token" in str(prefill.title)
    assert "one step: 10 ms, 1 ms for a request, 0.1 us for a KV token" in str(decode.title)
    assert draw(PROFILE, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def child(behaviour: str, folder: Path) -> Child:
    config = FakeConfig.model_validate({"behaviour": behaviour, "lives_file": str(folder / "lives")})
    spec = ChildSpec("profile", "tests.mooncake.fake_child", lambda _: config.model_dump_json())
    return Child(spec, "warning")


def test_what_a_child_measures_is_collected(tmp_path: Path) -> None:
    measured = asyncio.run(measure(child("measure", tmp_path)))
    assert measured == [
        Measured("prefill", 16, 0, 0.5, "cpu", "Z80"),
        Measured("decode", 1, 65, 0.25, "cpu", "Z80"),
    ]


def test_measuring_is_told_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "PERIOD_S", 0.0)
    asyncio.run(measure(child("measure", tmp_path)))
    assert "loading weights: 1 of 2 (" in capsys.readouterr().err


@pytest.mark.parametrize(("behaviour", "word"), [("fatal", "the model is not there"), ("crash", "-9")])
def test_a_child_that_fails_says_why(tmp_path: Path, behaviour: str, word: str) -> None:
    with pytest.raises(ProfileError, match=word):
        asyncio.run(measure(child(behaviour, tmp_path)))
