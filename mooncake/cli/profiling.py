"""The command `mooncake-serve profile FILE`, which measures prefill and decode for `conductor.profile`.

A separate process measures (`workers.process.profile`), with the configured model and device. This process
shows the progress, fits the costs, and writes the file and a picture.

Owns: the display, the fit. Does not know: how anything is measured.
"""

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from mooncake.cli.steps import StepDisplay
from mooncake.config.profile import DecodeCosts, PrefillCosts, Profile
from mooncake.config.settings import Config
from mooncake.errors import ConfigError, MooncakeError
from mooncake.messages.costs import Costs, Point, fit, prefill_quantities
from mooncake.messages.workers import Role
from mooncake.model.checkpoint import open_checkpoint
from mooncake.node.child import Child
from mooncake.node.plan import ChildSpec
from mooncake.node.process import Fatal, Measured, Progress
from mooncake.node.process_config import WorkerProcess
from mooncake.security.keys import ClusterKey

STOP_S = 4.0


class ProfileError(MooncakeError):
    """The measurement of a profile has failed."""


def profile(config: Config, file: Path) -> None:
    """Measure a profile, show it, and write it to `file`.

    Raises ConfigError, ModelError or ProfileError; an interruption writes nothing.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"cannot write the profile {file}: there is no directory {file.parent}")
    measured = asyncio.run(measure(_child(config)))
    made = profile_of(config, measured)
    made.save(file)
    console = rich.console.Console(soft_wrap=True, highlight=False)
    for table in tables(made):
        console.print(table)
    picture = file.with_suffix(".png")
    console.print(
        f"{file.absolute()} has the costs of {made.model} on {made.device}, {made.engine}.", markup=False
    )
    if draw(made, picture):
        console.print(f"{picture.absolute()} shows them.", markup=False)
    else:
        console.print("matplotlib is not installed, so there is no picture (pip install matplotlib).")
    console.print(f"Start the conductor with --conductor-profile {file}.", markup=False)


def _child(config: Config) -> Child:
    num_workers = sum(config.num_instances.values()) or 1
    process = WorkerProcess(
        cluster_key=ClusterKey.generate(),
        config=config,
        role=Role.PREFILL,
        instance="profile",
        incarnation=0,
        messenger_socket="",
        modules_socket="",
        num_local_workers=num_workers,
    )
    spec = ChildSpec("profile", "workers.process.profile", lambda _: process.model_dump_json())
    return Child(spec, config.log_level)


async def measure(child: Child) -> list[Measured]:
    """Return the child's measurements, and show its progress.

    The child has ended, or has been killed, when this returns or raises. Raises ProfileError.
    """
    measured: list[Measured] = []
    fatal: str | None = None
    with StepDisplay() as steps:
        try:
            async for item in child.start():
                match item:
                    case Progress(phase, done, total):
                        steps.show(phase, done, total or None)
                    case Measured():
                        measured.append(item)
                    case Fatal(message):
                        fatal = message
        finally:
            await _stop(child)
    assert child.process is not None
    if fatal is not None:
        raise ProfileError(fatal)
    if child.process.returncode != 0 or not measured:
        lines = "\n".join(child.last_lines)
        raise ProfileError(f"measuring ended with exit code {child.process.returncode}:\n{lines}")
    return measured


async def _stop(child: Child) -> None:
    """Stop the child, even in the middle of a measurement."""
    process = child.process
    if process is None or process.returncode is not None:
        return
    child.signal(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await process.wait()
            return
    child.signal(signal.SIGKILL)


def profile_of(config: Config, measured: Sequence[Measured]) -> Profile:
    """Return the costs that fit the measurements best.

    Raises ProfileError if prefill or decode was not measured.
    """
    points = {
        what: [Point(m.first, m.second, m.seconds) for m in measured if m.what == what]
        for what in ("prefill", "decode")
    }
    for what, of_kind in points.items():
        if not of_kind:
            raise ProfileError(f"nothing of {what} could be measured: raise kvcache.device_bytes")
    checkpoint = open_checkpoint(config.model, config.load_format)
    return Profile(
        model=checkpoint.name,
        shape=checkpoint.model.shape,
        dtype=checkpoint.dtype_of(config.dtype),
        engine=measured[0].engine,
        device=measured[0].device,
        prefill=PrefillCosts(*fit([_quantities(point) for point in points["prefill"]])),
        decode=DecodeCosts(*fit(points["decode"])),
        prefill_points=points["prefill"],
        decode_points=points["decode"],
    )


def _quantities(prefill: Point) -> Point:
    return Point(*prefill_quantities(prefill.first, prefill.second), prefill.seconds)


def tables(made: Profile) -> list[rich.table.Table]:
    """Return tables of measured and fitted durations, with the errors of the fit."""
    prefill, decode = made.costs
    prefills = [(point, _quantities(point)) for point in made.prefill_points]
    decodes = [(point, point) for point in made.decode_points]
    return [
        _table("prefill", ("new tokens", "cached tokens"), ("new token", "pair"), prefill, prefills),
        _table("decode, one step", ("requests", "KV tokens"), ("request", "KV token"), decode, decodes),
    ]


def _table(
    title: str,
    columns: Sequence[str],
    units: tuple[str, str],
    costs: Costs,
    points: Sequence[tuple[Point, Point]],
) -> rich.table.Table:
    errors = [costs.seconds(of.first, of.second) / of.seconds - 1 for _, of in points]
    mean = sum(map(abs, errors)) / len(errors)
    table = rich.table.Table(
        title=f"{title}: {_time(costs.constant_s)}, {_time(costs.first_s)} for a {units[0]},"
        f" {_time(costs.second_s)} for a {units[1]}",
        caption=f"mean error {mean:.1%}",
    )
    for column in (*columns, "measured ms", "fitted ms", "error"):
        table.add_column(column, justify="right")
    for (shown, of), error in zip(points, errors, strict=True):
        fitted_ms = 1000 * costs.seconds(of.first, of.second)
        table.add_row(
            f"{shown.first:,.0f}",
            f"{shown.second:,.0f}",
            f"{1000 * shown.seconds:,.2f}",
            f"{fitted_ms:,.2f}",
            f"{error:+.1%}",
        )
    return table


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:,.4g} us" if seconds < 1e-3 else f"{1e3 * seconds:,.4g} ms"


def draw(made: Profile, path: Path) -> bool:
    """Draw measured points over the fitted lines into `path`.

    Returns False if matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    prefill, decode = made.costs
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for cached in sorted({point.second for point in made.prefill_points}):
        points = [point for point in made.prefill_points if point.second == cached]
        fitted_s = [prefill.seconds(*prefill_quantities(point.first, cached)) for point in points]
        _curve(left, [point.first for point in points], points, fitted_s, f"{cached:,.0f} cached")
    left.set(xlabel="new tokens", ylabel="milliseconds", title="prefill: measured, and the fit")
    for batch_size in sorted({point.first for point in made.decode_points}):
        points = [point for point in made.decode_points if point.first == batch_size]
        fitted_s = [decode.seconds(batch_size, point.second) for point in points]
        _curve(right, [point.second for point in points], points, fitted_s, f"{batch_size:,.0f} requests")
    right.set(xlabel="KV tokens", ylabel="milliseconds", title="one step of decoding")
    for axes in (left, right):
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(f"{made.model}, {made.dtype}, {made.device}, {made.engine}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _curve(
    axes: Any, places: Sequence[float], points: Sequence[Point], fitted_s: Sequence[float], label: str
) -> None:
    """Draw the fit as a line, and the measured points over it, in milliseconds."""
    (line,) = axes.loglog(places, [1000 * seconds for seconds in fitted_s], label=label)
    axes.plot(places, [1000 * point.seconds for point in points], "o", c=line.get_color())
