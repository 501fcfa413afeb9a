"""Imports between packages go only along the arrows of docs/architecture.md."""

import ast
import difflib
import graphlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parent.parent
PACKAGES = {"mooncake", "conductor", "workers", "messenger", "kvstore", "kernels", "benchmarks", "tests"}
ALLOWED = {
    "mooncake": set(),
    "messenger": {"mooncake"},
    "kvstore": {"messenger", "mooncake"},
    "kernels": {"mooncake.native"},
    "workers.engine": {"kernels"},
    "workers": {"workers.engine", "kvstore", "messenger", "kernels", "mooncake"},
    "conductor": {"mooncake"},
    "conductor.front": {"conductor", "mooncake"},
    "conductor.process": {"conductor", "conductor.front", "mooncake"},
    "conductor.picker": {"mooncake"},
}
LAYERS = {
    "mooncake": """
        doubling, endpoints, errors, freed_memory, versions, yaml_errors | native, security | bus, messages
        | config, model | leadership, tracing | node | cli | __main__
    """,
    "messenger": "native | wire | shm | transport | rdma | paths, receiver | sender | doctor",
    "kvstore": "events | pool | protocol, ssd | client, transfer | connectors, server",
    "kernels": "head_norms | attention, cpu, cuda | kv_copy",
    "workers": "engine, errors | kvcache | execution | groups, modules | decode, prefill | process | vllm",
    "workers.engine": """
        logit_changes, spec, upload | kvcache, rotary, sampling, tensor_parallel
        | batch, process_group, weights | layers | decode_graphs | cuda | model | warm_up
    """,
    "conductor": """
        effects, index, performance | settings | view | admission, fronts, replication, scheduling | requests
        | membership | elasticity | policy | telemetry | front | process, picker
    """,
    "conductor.front": """
        config, errors, metrics, openai | caches, http | access, requests | generation | routes | process
    """,
}
"""What each package consists of, in layers from the bottom up: imports go from a layer to those below."""
MOST_FILES = 15
"""in one folder"""
SAME = 0.89
"""The similarity from which on two sentences of a docstring say the same; Args of two kinds reach 0.86."""
UNCOUNTED = {"__init__.py", "py.typed"}
PURE = {"conductor"}
IMPURE_LIBRARIES = {
    "asyncio",
    "torch",
    "zmq",
    "socket",
    "time",
    "fastapi",
    "uvicorn",
    "threading",
    "mooncake.bus.zeromq",
}
LIBRARIES = {
    "workers.engine": {"torch", "numpy"},
    "kernels": {"torch", "triton", "numpy"},
}


def unit_of(module: str) -> str:
    """The longest entry of ALLOWED that `module` belongs to."""
    units = [unit for unit in ALLOWED if module == unit or module.startswith(unit + ".")]
    return max(units, key=len)


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in sorted(PACKAGES - {"benchmarks", "tests"}):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if is_module(name) else node.module for name in whole}
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_follow_the_arrows(module: str, path: Path) -> None:
    unit = unit_of(module)
    for name in imports_of(path):
        if name.split(".")[0] in PACKAGES:
            target = unit_of(name) if name.split(".")[0] not in {"benchmarks", "tests"} else name
            assert target == unit or any(
                name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED[unit]
            ), f"{module} imports {name}"
        elif unit in LIBRARIES:
            root = name.split(".")[0]
            assert root in LIBRARIES[unit] or root in sys.stdlib_module_names, f"{module} imports {name}"


@pytest.mark.parametrize("package", LAYERS)
def test_what_a_package_consists_of_imports_only_from_layers_below(package: str) -> None:
    layers = [{part.strip() for part in layer.split(",")} for layer in LAYERS[package].split("|")]
    height = {part: number for number, layer in enumerate(layers) for part in layer}
    for module, path in modules():
        if not module.startswith(package + "."):
            continue
        part = module.removeprefix(package + ".").split(".")[0]
        for name in imports_of(path):
            if not name.startswith(package + "."):
                continue
            other = name.removeprefix(package + ".").split(".")[0]
            assert other == part or height[other] < height[part], f"{module} imports {name}"


def test_modules_form_no_loop() -> None:
    paths = dict(modules())
    imports = {module: imports_of(path) & paths.keys() - {module} for module, path in paths.items()}
    graphlib.TopologicalSorter(imports).prepare()


def test_a_folder_lists_few_files_and_says_what_it_is() -> None:
    for folder in {path.parent for _, path in modules()}:
        files = [path for path in folder.iterdir() if path.is_file() and path.name not in UNCOUNTED]
        assert len(files) <= MOST_FILES, folder
        if folder.parent != ROOT:
            assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """The place and the source of each docstring of a module, its classes, functions and attributes."""
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str())):
                        assert statement.end_lineno is not None
                        text = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
                        yield f"{path}:{statement.lineno}", text


def said_twice(docstring: str) -> tuple[str, str] | None:
    """Two sentences of a docstring that say nearly the same."""
    text = " ".join(docstring.partition("Owns: ")[0].lower().split())
    sentences = [sentence for sentence in re.split(r"(?<=[.:;]) ", text.strip('" ')) if len(sentence) >= 20]
    for one, other in itertools.combinations(sentences, 2):
        matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
        ratios = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # the fastest first
        if all(ratio() >= SAME for ratio in ratios):
            return one, other
    return None


@pytest.mark.parametrize("package", sorted(PACKAGES - {"tests"}))
def test_docstrings_say_a_thing_once_and_have_no_escaped_line_ends(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        for place, text in docstrings(path):
            assert "\\n" not in text, place
            assert said_twice(text) is None, place


def test_policy_does_no_io() -> None:
    found = {m: imports_of(path) & IMPURE_LIBRARIES for m, path in modules() if unit_of(m) in PURE}
    assert {module: impure for module, impure in found.items() if impure} == {}


def run(probe: str) -> list[str]:
    """What a new interpreter that runs this prints."""
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_transformers_does_not_take_our_kernels_for_another() -> None:
    probe = (
        "import transformers, kernels; print(kernels.__version__, transformers.utils.is_kernels_available())"
    )
    assert run(probe) == ["0.0.0", "False"]


def test_a_worker_on_a_cpu_needs_no_triton() -> None:
    probe = "import sys; sys.modules['triton'] = None; import workers.process.service; print('fine')"
    assert run(probe) == ["fine"]


def test_the_engine_and_the_kernels_need_only_torch_numpy_and_triton() -> None:
    # So that benchmarks of a device run where nothing else is installed.
    probe = (
        "import sys\n"
        "for name in ('msgspec', 'zmq', 'xxhash', 'pydantic', 'fastapi', 'transformers', 'yaml'):\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.gpu.checks, benchmarks.gpu.layers, benchmarks.gpu.steps\n"
        "print('fine')"
    )
    assert run(probe) == ["fine"]
