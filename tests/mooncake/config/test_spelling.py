import pytest

from mooncake.config.spelling import did_you_mean

FLAGS = ["--model", "--num-prefill", "--worker-max-batch", "--http-tls-cert", "--security-tls-cert"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--modle", "; did you mean --model?"),
        ("--num-prefil", "; did you mean --num-prefill?"),
        ("--num_prefill", "; did you mean --num-prefill?"),
        ("--max-batch", "; did you mean --worker-max-batch?"),
        ("--tls-cert", "; did you mean --http-tls-cert or --security-tls-cert?"),
        ("--something-else", ""),
    ],
)
def test_the_nearest_name_is_told_if_there_is_one(word: str, meant: str) -> None:
    assert did_you_mean(word, FLAGS) == meant


def test_a_key_that_stands_elsewhere_is_named_with_its_section() -> None:
    assert did_you_mean("max_batch", ["http.port", "worker.max_batch"]) == "; did you mean worker.max_batch?"
