"""How wrong arguments are told, in every program that is installed: one line that helps, exit code 2."""

from collections.abc import Callable, Sequence

import pytest

from benchmarks.tools.load.cli import run as bench
from benchmarks.tools.planner.cli import run as plan
from benchmarks.tools.simulator.cli import run as sim
from kvstore.client.cli import run as kv
from messenger.doctor.cli import run as doctor
from mooncake.cli.command_line import FAILED, INTERRUPTED, WRONG_USE, Parser, exit_code
from mooncake.cli.commands import run as serve
from mooncake.errors import ConfigError, PoolError

Program = Callable[[Sequence[str]], int]
PROGRAMS = {"serve": serve, "kv": kv, "doctor": doctor, "bench": bench, "sim": sim, "plan": plan}


def refusal_of(program: Program, arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is told on stderr, which is one line."""
    try:
        code: object = program(arguments.split())
    except SystemExit as end:
        code = end.code
    assert code == WRONG_USE
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("serve", "--modle x", "unknown option --modle; did you mean --model?"),
        ("serve", "--num-prefil 2", "unknown option --num-prefil; did you mean --num-prefill?"),
        ("serve", "--port 80 --htp-host x", "unknown option --htp-host; did you mean --http-host?"),
        ("serve", "--max-batch 2", "unknown option --max-batch; did you mean --worker-max-batch?"),
        ("serve", "--port", "argument --port/--http-port: expected one argument"),
        ("serve", "--port many", "http.port: "),
        ("serve", "keygn f", "unknown command keygn; did you mean keygen?"),
        (
            "serve",
            "some-model",
            "command some-model; expected one of keygen, profile, apikey, drain, role, migrate; serving",
        ),
        ("serve", "keygen a b", "'b' is one argument too many"),
        ("serve", "keygen a --port 3", "unknown option --port"),
        ("serve", "apikey a b --max-concurrnt 3", "unknown option --max-concurrnt; did you mean --max-con"),
        ("serve", "drain", "required: INSTANCE"),
        ("serve", "role prefill-0 decod", "unknown value decod; did you mean decode?"),
        ("serve", "migrate a b --sequences 1", "expected a share from 0.01 to 0.99, such as 0.5, got '1'"),
        ("serve", "drain a --ulr x", "unknown option --ulr; did you mean --url?"),
        ("kv", "stat", "unknown command stat; did you mean stats?"),
        ("kv", "", "required: COMMAND"),
        ("kv", "--json stats", "unknown option --json; it belongs behind the command"),
        ("kv", "stats --jsn", "unknown option --jsn; did you mean --json?"),
        ("kv", "get 12 --out f", "a key has 32 hexadecimal digits, not '12'"),
        ("kv", "get", "required: KEY_HEX, --out"),
        ("doctor", "--per x", "unknown option --per; did you mean --peer?"),
        ("doctor", "--peer x", "expected host:port, such as 10.0.0.2:7900, not 'x'"),
        ("doctor", "--config /no/such", "--config: there is no file /no/such"),
        ("doctor", "x", "'x' is one argument too many"),
        ("bench", "rnu", "unknown command rnu; did you mean run?"),
        ("bench", "run http://h --lengths 1/1 --rate 2", "unknown option --rate; did you mean --rates?"),
        ("bench", "run http://h --lengths 1/1 --rates a,b", "argument --rates: expected a number, got a"),
        ("bench", "run http://h --lengths 1/1 --concurrency 1.5", "expected a whole number, got 1.5"),
        ("bench", "run http://h --mix chat-and-document", "did you mean chat-and-documents?"),
        ("bench", "run http://h --lengths 1/1 --token-ids x", "expected A:B with 0 <= A < B, got x"),
        ("sim", "--trace f --sped 2", "unknown option --sped; did you mean --speed?"),
        ("sim", "--trace f --speed 2 --scheduling randm", "got randm; did you mean random?"),
        ("sim", "--trace f --prefill", "argument --prefill: expected one argument"),
        ("plan", "--devces 16", "unknown option --devces; did you mean --devices?"),
        ("plan", "--devices many", "argument --devices: expected a whole number, got many"),
        ("plan", "--devices 16 --lengths 128", "expected tokens in and out, as 128/64, got 128"),
    ],
)
def test_wrong_arguments_are_told_in_one_line_that_helps(
    name: str, arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal_of(PROGRAMS[name], arguments, capsys)
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_examples_and_says_what_values_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["--help-all"] if name == "serve" else ["--help"]):
        with pytest.raises(SystemExit) as end:
            PROGRAMS[name](arguments)
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert f"examples:\n  mooncake-{name}" in text
        assert "VALUE" not in text.replace("--KEY VALUE", "")


def test_values_that_look_like_options_are_values() -> None:
    parser = Parser()
    parser.add_argument("--text")
    parser.add_argument("--number", type=int)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args(["--text=--bold", "--number", "-5", "--", "--free"])
    assert (options.text, options.number, options.rest) == ("--bold", -5, ["--free"])


def test_exit_codes_tell_wrong_use_from_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> Callable[[], int]:
        def command() -> int:
            raise error

        return command

    assert exit_code(raising(ConfigError("a"))) == WRONG_USE
    assert exit_code(raising(PoolError("b"))) == FAILED
    assert exit_code(raising(KeyboardInterrupt())) == INTERRUPTED
    assert capsys.readouterr().err == "error: a\nerror: b\n"
