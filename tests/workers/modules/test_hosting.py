"""A helper's own requests, and memory, while it hosts modules of another instance."""

import asyncio
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from mooncake.messages.migration import ModulesPart, PlaceModules
from mooncake.messages.workers import WorkFailed
from tests.kvstore.nodes import CLUSTER_KEY, DEADLINE_S
from tests.workers.decode_lab import StartDecodeLab
from tests.workers.gate import Brake
from tests.workers.mini_cluster import FINGERPRINT, tokens_of
from tests.workers.modules_lab import NUM_PAGES, paired, until, wide_model
from tests.workers.modules_lab import hosting as hosting_of
from workers.errors import ModulesStayError
from workers.modules import connections, hosting
from workers.modules.helper_link import HelperAccess, HelperLink
from workers.modules.link_messages import LINK_VERSION, HostModules

pytestmark = pytest.mark.cluster
ACCESS = HelperAccess(CLUSTER_KEY, DEADLINE_S)


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return wide_model()


async def test_an_owner_that_ends_leaves_nothing_behind(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        request = HostModules(LINK_VERSION, "d9", FINGERPRINT, ModulesPart(1), NUM_PAGES, NUM_PAGES, 16, 8)
        executor = pair.owner.executor
        link = await HelperLink.connect(pair.path, request, executor.model, executor.kv, ACCESS, lambda: None)
        assert pair.host.num_hosted == {"d9": 1}
        assert pair.helper.executor.kv.pages.num_usable == NUM_PAGES * 3 // 4
        link.close()  # as the system does at the end of a process
        await until(lambda: not pair.host.num_hosted)
        assert pair.helper.executor.kv.pages.num_free == NUM_PAGES


async def test_an_owner_on_another_host_that_ends_before_all_connections_are_open_leaves_nothing_behind(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "_JOIN_TIMEOUT_S", 100 * DEADLINE_S)
    async with paired(start_decode_lab, tmp_path, is_remote=True) as pair:
        request = HostModules(LINK_VERSION, "d9", FINGERPRINT, ModulesPart(1), NUM_PAGES, NUM_PAGES, 16, 8)
        with await connections.connect(pair.path, CLUSTER_KEY) as sock:
            await connections.send(sock, request)
            assert await connections.receive(sock)
            assert pair.host.num_hosted == {"d9": 1}
        await until(lambda: not pair.host.num_hosted)
        assert pair.helper.executor.kv.pages.num_free == NUM_PAGES


async def test_a_helper_without_room_says_the_sum(start_decode_lab: StartDecodeLab, tmp_path: Path) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        place = await pair.place(3)
        assert (place.error, place.part.num_heads) == ("", 3)  # 36 of 48 pages: a quarter stays free
        await pair.move(0)
        taken = pair.helper.executor.kv.pages.allocate(1)
        place = await pair.place(3)
        assert place.error == (
            "d1 has no room: 3 of the KV heads in 48 pages take 36 of its pages, and it can lend 35 "
            "(47 of 48 are free, 12 stay free for its requests, the longest of which may need 0)"
        )
        assert place.part.num_heads == 0
        pair.helper.executor.kv.pages.free(taken)
        await pair.move(1)
        assert (await pair.place(2)).error == "1 of the KV heads are at d1"


async def test_a_helper_keeps_enough_pages_for_the_rest_of_its_longest_request(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await tokens_of(pair.begin("alone", 230, pair.helper).answer)
        await until(lambda: pair.helper.executor.kv.pages.num_free == NUM_PAGES)
        own = pair.begin("own", 230, pair.helper)  # 30 pages in the end
        await until(lambda: bool(own.answer.tokens))
        said = re.search(
            r"take 24 of its pages, and it can lend (\d+) \((\d+) of 48 are free, 12 stay free for its"
            r" requests, the longest of which may need 30\)$",
            (await pair.place(2)).error,
        )
        assert said is not None
        num_lendable, num_free = map(int, said.groups())
        assert num_lendable == min(NUM_PAGES - 30, num_free - 12)
        await pair.move(1)  # 16 pages
        assert await tokens_of(own.answer) == expected


async def test_a_helper_has_no_helper_whatever_a_conductor_orders(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        await pair.move(1)
        pair.helper.decode.place_modules(PlaceModules(1, 1, "d2", "no socket", ModulesPart(1)))
        await until(lambda: bool(pair.helper.decode.modules.error))
        assert pair.helper.decode.modules.error == "d1 has modules of others itself"
        assert pair.helper.decode.modules.helper == ""
        executor = pair.owner.executor
        host = hosting_of(pair.owner, str(tmp_path / "owner.sock"))
        task = pair.lab.group.create_task(host.run())
        request = HostModules(LINK_VERSION, "d9", FINGERPRINT, ModulesPart(1), 1, NUM_PAGES, 16, 8)
        await until((tmp_path / "owner.sock").exists)
        with pytest.raises(ModulesStayError, match="are elsewhere themselves"):
            await HelperLink.connect(
                str(tmp_path / "owner.sock"), request, executor.model, executor.kv, ACCESS, lambda: None
            )
        task.cancel()
        await pair.move(0)


async def test_requests_that_a_helper_had_wait_for_each_other_when_pages_are_lent(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        expected = await tokens_of(pair.begin("alone", 150, pair.helper).answer)
        await until(lambda: pair.helper.executor.kv.pages.num_free == NUM_PAGES)
        brake = Brake(pair.helper.executor)
        with brake.on():
            own = [pair.begin(f"own{index}", 150, pair.helper) for index in range(4)]  # 20 pages in the end
            await brake.holds()
            await pair.move(1)
            assert pair.helper.executor.kv.pages.num_usable == NUM_PAGES - 16
        for one in own:
            assert await tokens_of(one.answer) == expected
        assert pair.helper.decode.meter.stats.num_preemptions


async def test_a_request_for_which_too_many_pages_are_lent_is_placed_elsewhere(
    start_decode_lab: StartDecodeLab, tmp_path: Path
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        await pair.move(2)
        late = pair.begin("late", 230, pair.helper)
        answer = await pair.lab.next_said(late.ref)
        assert answer == WorkFailed(
            late.ref,
            "it may need 30 of 48 device pages, and 12 are not lent to another instance",
            retryable=True,
        )
        assert pair.lab.num_beats == 1, "the Conductor is told first how many pages there are"
        assert len(await tokens_of(pair.begin("elsewhere", 230, pair.owner).answer)) == 230


async def test_modules_for_which_a_helper_has_no_memory_are_refused_with_the_sum(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with paired(start_decode_lab, tmp_path) as pair:
        monkeypatch.setattr(hosting, "available_bytes", lambda: 1 << 20)
        assert (await pair.place(1)).error.endswith(" MiB, of which 1 MiB are available")
        kv = pair.helper.executor.kv
        assert (pair.host.num_hosted, kv.pages.num_free, kv.pages.num_usable) == ({}, NUM_PAGES, NUM_PAGES)
        monkeypatch.setattr(hosting, "available_bytes", lambda: None)  # nobody knows
        await pair.move(1)


async def test_a_helper_that_ends_waits_for_no_memory(
    start_decode_lab: StartDecodeLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, was_given_up = threading.Event(), list[bool]()

    def allocate(_fd: int, _size_bytes: int, is_given_up: Callable[[], bool]) -> None:
        began.set()
        end_s = time.monotonic() + DEADLINE_S
        while not is_given_up() and time.monotonic() < end_s:
            pass
        was_given_up.append(is_given_up())

    async with paired(start_decode_lab, tmp_path) as pair:
        monkeypatch.setattr(hosting, "allocate", allocate)
        number = pair.order(1)
        assert await asyncio.to_thread(began.wait, DEADLINE_S)
        await pair.lose_helper()
        assert was_given_up == [True]
        assert not (await pair.ended(number)).are_elsewhere
        assert pair.helper.executor.kv.pages.num_free == NUM_PAGES
