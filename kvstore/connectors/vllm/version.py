"""The version of vLLM that the connector is made for.

Owns: the check of the installed version. Does not know: how other versions differ.
"""

from importlib import metadata

from mooncake.errors import MismatchError

VERSION = "0.32"


def check_version(found: str | None = None) -> None:
    """Check that `found`, by default the installed version of vLLM, is supported. Raises MismatchError."""
    if found is None:
        try:
            found = metadata.version("vllm")
        except metadata.PackageNotFoundError:
            found = "none"
    if found.split("+")[0].split(".")[:2] != VERSION.split("."):
        raise MismatchError(
            "version of vLLM",
            f"{VERSION}.*",
            found,
            f"its connectors change with every release; install vllm=={VERSION}.*, or the release of"
            " mooncake-serve that names yours",
        )
