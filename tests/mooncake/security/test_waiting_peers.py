from mooncake.security.waiting_peers import WaitingPeers


def test_the_oldest_makes_room_and_whoever_has_left_does_not_count() -> None:
    put_out: list[str] = []
    crowd = WaitingPeers[str](2, put_out.append)
    for peer in "abc":
        crowd.enter(peer)
    assert put_out == ["a"]
    assert crowd.leave("b")
    crowd.enter("d")
    assert put_out == ["a"]
    crowd.enter("e")
    assert put_out == ["a", "c"]
    assert not crowd.leave("c"), "it is not there any more"
    assert len(crowd) == 2
