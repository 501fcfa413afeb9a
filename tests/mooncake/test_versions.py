"""Two releases agree on the newest version that both speak, or say which of them must be upgraded."""

import pytest

from mooncake.versions import Versions

OURS = Versions(27, 28)


@pytest.mark.parametrize(
    ("theirs", "common"),
    [
        (Versions.named(27, None), 27),
        (Versions.named(28, None), 28),
        (Versions.named(26, 27), 27),
        (Versions.named(27, 28), 28),
        (Versions.named(28, 29), 28),
        (Versions.named(26, None), None),
        (Versions.named(25, 26), None),
        (Versions.named(29, 30), None),
        (Versions.named(30, 27), None),
    ],
)
def test_the_newest_version_that_both_know_is_spoken(theirs: Versions, common: int | None) -> None:
    assert OURS.common(theirs) == theirs.common(OURS) == common


@pytest.mark.parametrize(
    ("theirs", "advice"),
    [
        (Versions(25, 26), "upgrade them to a release that speaks 27 first"),
        (Versions(29, 30), "upgrade us to a release that speaks 29 first"),
    ],
)
def test_the_older_side_is_to_be_upgraded(theirs: Versions, advice: str) -> None:
    assert OURS.advice("us", theirs, "them").startswith(advice)


def test_versions_are_named_for_people() -> None:
    assert f"{Versions(27, 27)}, {OURS}, {Versions(1, 1 << 62)}" == f"27, 27 and 28, 1 to {1 << 62}"
