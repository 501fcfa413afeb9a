"""Wheels for a machine that has a GPU and torch, but no package index.

    python -m benchmarks.gpu.bundle FOLDER --installed FILE [--python 3.12] [--glibc 2.35] [--also NAME ...]

FILE has the output of `python3 -m pip list --format=json` on that machine. FOLDER gets this project and its
requirements, in the versions that are installed here. Requirements that the machine already has in a
sufficient version are left out.

Owns: the list of missing packages. Does not know: indexes and tags of wheels, which are pip's subject.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "mooncake-serve"


def missing(needed: Iterable[str], installed: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the version of each package that a machine lacks, or has in an unsuitable version.

    Args:
        needed: Requirements, in the form of pyproject.toml. The requirements of these packages are added.
        installed: The version of each package of that machine, by canonical name.
        python: The version of that machine's Python.

    Raises PackageNotFoundError if a required package is not installed here.
    """
    versions: dict[str, str] = {}
    pending = [(Requirement(text), frozenset({""})) for text in needed]
    seen = set()
    while pending:
        requirement, extras = pending.pop()
        environments = (
            {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
            for extra in extras
        )
        if requirement.marker and not any(map(requirement.marker.evaluate, environments)):
            continue
        name = canonicalize_name(requirement.name)
        is_there = name in installed and requirement.specifier.contains(installed[name], prereleases=True)
        if is_there or requirement in seen:
            continue
        seen.add(requirement)
        ours = distribution(name)
        versions[name] = ours.version
        own_extras = frozenset({"", *requirement.extras})
        pending += [(Requirement(text), own_extras) for text in ours.requires or ()]
    return versions


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.bundle", description="see the module's docstring"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--installed", type=Path, required=True, metavar="FILE")
    parser.add_argument("--python", default="3.12", help="the machine's")
    parser.add_argument("--glibc", default="2.35", help="the machine's, or an older one")
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME", help="packages beside ours")
    parser.add_argument("--most-mib", type=int, default=512, help="of all wheels")
    chosen = parser.parse_args()
    listed = json.loads(chosen.installed.read_text())
    installed: dict[str, str] = {canonicalize_name(package["name"]): package["version"] for package in listed}
    if "torch" not in installed:
        print(
            f"error: {chosen.installed} has no torch: it and CUDA's libraries come from the machine's maker"
        )
        return 1
    try:
        versions = missing([*(distribution(PROJECT).requires or ()), *chosen.also], installed, chosen.python)
    except PackageNotFoundError as error:
        print(f"error: {error.name} is not installed here")
        return 1
    _pip("wheel", "--quiet", "--no-deps", f"--wheel-dir={chosen.folder}", str(ROOT))
    if versions:
        needed = [f"{name}=={version}" for name, version in sorted(versions.items())]
        where = [f"--python-version={chosen.python}", "--implementation=cp", *_platforms(chosen.glibc)]
        wheels = ["--no-deps", "--only-binary=:all:", f"--dest={chosen.folder}"]
        _pip("download", "--quiet", *wheels, *where, *needed)
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in chosen.folder.glob("*.whl")}
    for name, mib in sorted(sizes.items()):
        print(f"{mib:8.1f} MiB {name}")
    total_mib = sum(sizes.values())
    print(f"{total_mib:8.1f} MiB in {chosen.folder}")
    if total_mib > chosen.most_mib:
        largest = max(sizes, key=lambda name: sizes[name])
        print(f"error: more than {chosen.most_mib} MiB (--most-mib); the largest is {largest}")
        return 1
    return 0


def _platforms(glibc: str) -> list[str]:
    """Return pip's options for x86-64 wheels that run with this glibc.

    There is an option for this version and for each older one, because pip does not add older versions
    itself.
    """
    newest = int(glibc.removeprefix("2."))
    names = [f"manylinux_2_{minor}_x86_64" for minor in range(newest, 4, -1)]
    return [f"--platform={name}" for name in (*names, "manylinux2014_x86_64", "manylinux1_x86_64")]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
