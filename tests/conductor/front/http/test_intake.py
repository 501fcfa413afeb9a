from conductor.front.http.intake import Intake


def test_whoever_has_been_sending_for_longest_makes_room() -> None:
    put_out: list[str] = []
    intake = Intake[str](100, put_out.append)
    intake.came("slow", 60)
    intake.came("quick", 40)
    assert put_out == []
    intake.came("quick", 1)
    assert put_out == ["slow"]
    intake.came("another", 59)
    assert put_out == ["slow"]
    intake.left("quick")
    intake.came("another", 41)
    assert put_out == ["slow"]
    intake.came("another", 1)
    assert put_out == ["slow", "another"]
