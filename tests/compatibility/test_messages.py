"""Today's messages beside those of the last release: whoever changes them finds out here what is to be done.

A cluster is upgraded node by node, so this tree and the last release read each other (`mooncake.versions`).
"""

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pytest

from mooncake.versions import Versions
from tests.compatibility.comparing import Misread, Unknown, differences
from tests.compatibility.schema import PROTOCOLS, WITHIN_INSTANCE, Schema, recorded, schema_of

NEW = {
    "Register.newest_version": "An older Conductor takes the oldest version, which is its own.",
    "FrontHello.newest_version": "As in Register.",
    "Registered.version": "An older worker speaks one version.",
    "ClusterState.version": "An older front speaks one version.",
    "Hello.newest_version": "An older receiver takes the oldest version, which is its own.",
    "Challenge.version": "An older sender speaks one version.",
    "Connect.oldest_version": "Older pools and clients speak one version.",
    "Connect.newest_version": "As the oldest.",
    "Connected.version": "An older client speaks one version.",
    "Register.modules": "An older Conductor orders no moves, and refuses nothing that depends on them.",
    "Register.least_chunk_tokens": "An older Conductor inlines prompts as it did before.",
    "Register.can_migrate": "An older Conductor interrupts the answer, which goes on elsewhere, as before.",
    "Heartbeat.moves": "An older Conductor has no metrics of moves.",
    "Heartbeat.modules": "An older Conductor takes the number of pages that was registered.",
    "PlaceModules": "It is sent only to workers whose `Register.modules` says that modules can move.",
    "MoveModules": "A front sends it only to a Conductor of version 28 or newer.",
    "InstanceStatus.modules": "An older front passes on what it knows to operators.",
    "InstanceStatus.num_device_pages": "As `modules`.",
    "InstanceList.epoch": "Commands at an older front take missing instances for lost, as before.",
    "WorkFailed.is_refused": "An older Conductor gives the request up, as it is not retryable.",
    "Failed.is_refused": "An older front answers 500, as it did before.",
    "WorkFailed.param": "An older Conductor passes on no name of a field.",
    "Failed.param": "An older front names no field in its answer.",
    "Submit.num_choices": "An older Conductor takes each choice by itself. It gets all choices at once.",
    "Accepted": "It answers `Submit.num_choices` above 1, which only newer fronts send.",
    "Candidate.fit": "An older Conductor stands by unchecked, as it did before.",
}
"""Messages, fields and values that the last release does not know, and why it is right that it ignores the
field, or is never sent the rest."""
LINKS = [(protocol, link) for protocol, (_, links) in PROTOCOLS.items() for link in links]


@pytest.fixture(scope="module")
def last() -> Schema:
    return recorded()


@pytest.fixture(scope="module")
def today() -> Schema:
    return schema_of("today")


@pytest.mark.parametrize(("protocol", "link"), LINKS)
def test_this_tree_reads_the_last_release(protocol: str, link: str, last: Schema, today: Schema) -> None:
    version = last.versions[protocol]
    assert not list(differences(last, today, link)), (
        f"the last release (version {version} of protocol {protocol!r}) sends what this tree does not read:"
        f" go on reading it, with defaults for new fields, until version {version} is not spoken any more"
    )


@pytest.mark.parametrize(("protocol", "link"), LINKS)
def test_the_last_release_reads_this_tree(protocol: str, link: str, last: Schema, today: Schema) -> None:
    found = list(differences(today, last, link))
    version = last.versions[protocol]
    assert not [one for one in found if isinstance(one, Misread)], (
        f"the last release (version {version} of protocol {protocol!r}) misreads what this tree sends: add a"
        f" new field or message instead, and go on sending the old one until version {version} is not spoken"
    )
    assert {one.name for one in found} <= NEW.keys(), (
        "the last release does not know these: a field is ignored there, all else makes it drop the whole"
        " message. Send what must be understood only to peers that speak the new version; then enter here,"
        " in NEW, why this is right"
    )


def test_no_other_reason_is_given_than_for_what_is_new(last: Schema, today: Schema) -> None:
    found = [one for _, link in LINKS for one in differences(today, last, link)]
    assert {one.name for one in found if isinstance(one, Unknown)} == NEW.keys()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_version_is_raised_once_for_all_changes_since_the_last_release(
    protocol: str, last: Schema, today: Schema
) -> None:
    spoken, links = PROTOCOLS[protocol]
    before = last.versions[protocol]
    of_instance = WITHIN_INSTANCE if protocol == "cluster" else {}
    is_changed = any(_unlike(last, today, link) for link in [*links, *of_instance])
    allowed = [Versions(before, before + 1)] + [Versions(before - 1, before)] * (not is_changed)
    assert spoken in allowed, (
        f"protocol {protocol!r} has version {before} in the last release, and its messages have"
        f" {'' if is_changed else 'not '}changed: this tree must speak versions {allowed[-1]}"
    )


def _unlike(last: Schema, today: Schema, link: str) -> bool:
    return any(differences(last, today, link)) or any(differences(today, last, link))


def test_equal_names_of_blocks_and_models_mean_equal_bytes(last: Schema, today: Schema) -> None:
    assert today.values == last.values, (
        "nodes of the last release have blocks with these names and checksums: for blocks with another"
        " content let `model_fingerprint` begin with another word, so that both releases refuse each other"
    )


# -- the comparison itself --------------------------------------------------------------------------


def of(type_: Any) -> Schema:
    """The schema of one link."""
    links = {"link": type_}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROTOCOLS, "cluster", (Versions(1, 1), links))
        patch.setitem(PROTOCOLS, "messengers", (Versions(1, 1), {}))
        patch.setitem(PROTOCOLS, "pool", (Versions(1, 1), {}))
        return schema_of("")


def struct(name: str, *fields: Any, **options: Any) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, fields, module="mooncake.test", tag=True, **options)


array, sparse = partial(struct, "A", array_like=True), partial(struct, "A", omit_defaults=True)
A, B = struct("A", ("x", int)), struct("B", ("x", int))
Small = Annotated[int, msgspec.Meta(ge=0, le=9)]


@pytest.mark.parametrize(
    ("written", "read", "unknown", "misread"),
    [
        (A, A | B, [], []),
        (A | B, A, ["B"], []),
        (A, struct("A"), ["A.x"], []),
        (struct("A"), struct("A", ("x", int, 1)), [], []),
        (struct("A"), A, [], ["A.x"]),
        (A, struct("A", ("x", str)), [], ["A.x"]),
        (A, struct("A", ("x", float)), [], []),
        (A, struct("A", ("x", int | None)), [], []),
        (struct("A", ("x", int | None)), A, [], ["A.x"]),
        (struct("A", ("x", Small)), A, [], []),
        (A, struct("A", ("x", Small)), [], ["A.x"]),
        (struct("A", ("x", list[int])), struct("A", ("x", list[Small])), [], ["A.x"]),
        (struct("A", ("x", tuple[int])), struct("A", ("x", tuple[int, int])), [], ["A.x"]),
        (struct("A", ("x", Literal["a", "b"])), struct("A", ("x", Literal["a"])), ["A.x: b"], []),
        (struct("A", ("x", Literal["a"])), struct("A", ("x", Literal["a", "b"])), [], []),
        (array(("x", int), ("y", int)), array(("x", int)), ["A.y"], []),
        (array(("x", int)), array(("x", int), ("y", int, 1)), [], []),
        (array(("y", int), ("x", int)), array(("x", int), ("y", int)), [], ["A.y", "A.x"]),
        (sparse(("x", int, 1)), sparse(("x", int, 2)), [], ["A.x"]),
    ],
)
def test_what_a_reader_does_not_understand_is_found(
    written: Any, read: Any, unknown: list[str], misread: list[str]
) -> None:
    found = list(differences(of(written), of(read), "link"))
    assert [one.name for one in found if isinstance(one, Unknown)] == unknown
    assert [one.where for one in found if isinstance(one, Misread)] == misread
