import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from mooncake.cli import commands, profiling
from mooncake.cli import main as cli
from mooncake.cli.profiling import ProfileError


def test_ctrl_c_while_it_is_being_imported_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    class CtrlC:
        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            if name == commands.__name__:
                raise KeyboardInterrupt
            return None

    monkeypatch.delitem(sys.modules, commands.__name__)
    monkeypatch.setattr(sys, "meta_path", [CtrlC(), *sys.meta_path])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130


def test_wrong_use_is_told_in_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--no-such-flag", "1"], ["keygen"], ["keygen", "a", "b"], ["--http-port"]):
        with pytest.raises(SystemExit) as caught:
            commands.run(arguments)
        assert caught.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) <= 3, lines
        assert "error: " in lines[-1]
    for arguments in (["--http-port", "many"], ["--config", "/no/such/file"], ["--role", "nobody"]):
        assert commands.run(arguments) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")


def test_a_measurement_that_fails_is_no_wrong_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def fail(_: object) -> None:
        raise ProfileError("the device is gone")

    monkeypatch.setattr(profiling, "measure", fail)
    assert commands.run(["profile", str(tmp_path / "costs.json")]) == 1
    assert capsys.readouterr().err == "error: the device is gone\n"


def test_help_names_sections_and_defaults_as_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.run(["--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "conductor: The conductor's listeners and limits." in text
    assert "(default: 127.0.0.1)" in text
    assert "(default: true)" in text
    assert not any(python in text for python in ("default: [", "default: {", "default: True", "default: )"))
