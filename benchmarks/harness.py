# SPDX-License-Identifier: Apache-2.0
"""Interleaved measurement, its statistics, and the table, JSON and picture made of it.

Speeds of a shared machine drift by half within a minute. So ours and the baseline are always
called in turns, each pair of neighbouring calls gives one ratio, and a result is the median of
those ratios with their quartiles.
"""

import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

Work = Callable[[], object]


@dataclass(frozen=True)
class Target:
    """The bound that a ratio must keep: `at_least` or, if that is false, at most `bound`."""

    bound: float
    at_least: bool
    unit: str = "x"

    def met_by(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}{self.unit}"


def at_least(bound: float) -> Target:
    return Target(bound, at_least=True)


def at_most(bound: float, unit: str = "x") -> Target:
    return Target(bound, at_least=False, unit=unit)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `ours` and `theirs` are medians in `unit`; `ratio` and its quartiles `low` and `high` are what
    the target bounds, or, without a target, what there is to know. `panel`, `series` and `x` place
    the row in the picture; `floor` says, where the target is missed, what could be reached.
    """

    topic: str
    what: str
    against: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    low: float
    high: float
    samples: int
    target: Target | None = None
    panel: str = ""
    series: str = ""
    x: float = 0
    floor: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.target.met_by(self.ratio)


@dataclass(frozen=True)
class Pairs:
    """Measurements of ours and of the baseline, in seconds, taken in turns."""

    ours: np.ndarray
    theirs: np.ndarray

    @property
    def speedup(self) -> np.ndarray:
        """How many times as long the baseline takes."""
        return self.theirs / self.ours

    @property
    def slowdown(self) -> np.ndarray:
        """How many times as long ours takes."""
        return self.ours / self.theirs

    def row(
        self, topic: str, what: str, against: str, ratios: np.ndarray, unit: str = "us", **more: Any
    ) -> Row:
        """A row of these measurements that shows the spread of `ratios`."""
        scale = {"us": 1e6, "ms": 1e3, "s": 1.0}[unit]
        low, ratio, high = np.percentile(ratios, (25, 50, 75)).tolist()
        ours, theirs = (float(np.median(times)) * scale for times in (self.ours, self.theirs))
        return Row(topic, what, against, ours, theirs, unit, ratio, low, high, len(ratios), **more)


def measure(
    ours: Work, theirs: Work, *, pairs: int, seconds: float = 0.0, limit: float = 8.0
) -> Pairs:
    """Time both in turns, in changing order, after a warm-up of each.

    Args:
        pairs: how many times each is measured.
        seconds: a measurement repeats the call until it has taken about this long, and is the
            time of one call.
        limit: seconds after which three pairs are enough.
    """
    timed = [_Timed(ours, seconds), _Timed(theirs, seconds)]
    times: list[list[float]] = []
    with _no_collection():
        for order in in_turns(pairs, limit):
            taken = [0.0, 0.0]
            for which in order:
                taken[which] = timed[which]()
            times.append(taken)
    return Pairs(*np.array(times).T)


def in_turns(pairs: int, limit: float) -> Iterator[tuple[int, int]]:
    """Which of the two goes first and which second, for each of `pairs` pairs; for three of them
    where those take more than `limit` seconds."""
    began = time.perf_counter()
    for pair in range(pairs):
        if pair >= 3 and time.perf_counter() - began > limit:
            return
        yield (0, 1) if pair % 2 else (1, 0)


class _Timed:
    def __init__(self, work: Work, seconds: float) -> None:
        self.work = work
        self.calls = 1
        work()
        if seconds:
            self.calls = max(1, round(seconds / min(self(), self())))

    def __call__(self) -> float:
        work = self.work
        began = time.perf_counter()
        for _ in range(self.calls):
            work()
        return (time.perf_counter() - began) / self.calls


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


HEADINGS = ("what", "ours", "against", "theirs", "ratio", "quartiles", "target", "met")


def table(rows: Iterable[Row]) -> str:
    """All rows as one Markdown table whose columns line up."""
    lines = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    met = {True: "yes", False: "**no**", None: ""}[row.met]
    unit = "x" if row.target is None else row.target.unit
    return (
        f"{row.topic}, {row.what}",
        f"{_short(row.ours)} {row.unit}",
        row.against,
        f"{_short(row.theirs)} {row.unit}",
        f"{_short(row.ratio)}{unit}",
        f"{_short(row.low)} to {_short(row.high)}",
        "" if row.target is None else str(row.target),
        met,
    )


def _short(value: float) -> str:
    if value == 0 or 0.1 <= abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def report(rows: Sequence[Row], about: dict[str, str], profiles: Iterable[str], note: str) -> str:
    """The Markdown page: what was measured where, the table, what is missed and why."""
    bounded = [row for row in rows if row.target is not None]
    missed = [row for row in bounded if not row.met]
    lines = [
        "# Results",
        "",
        f"Written by `make bench` on {about['date']}." + (f" **{note}**" if note else ""),
        "Ours and the other are always run in turns; a ratio is the median over such pairs, beside",
        "its quartiles. A target `>=` bounds how many times as long the other takes; a target `<=`",
        "how many times as long ours takes, or how much more ours takes in the unit shown.",
        "",
        *(f"- {name}: {value}" for name, value in about.items() if name != "date"),
        "",
        f"**{len(bounded) - len(missed)} of {len(bounded)} targets met.**",
        "",
        "![Times of this project and of what it is compared with](curves.png)",
        "",
        table(rows),
        "",
    ]
    if missed:
        lines += ["## Missed", ""]
        lines += [
            f"- {row.topic}, {row.what}, against {row.against}: {_short(row.ratio)}"
            f"{row.target.unit if row.target else ''}, wanted {row.target}. {row.floor}".rstrip()
            for row in missed
        ]
        lines.append("")
    lines += ["## What the profiles showed", "", *(f"- {line}" for line in profiles)]
    return "\n".join(lines) + "\n"


def write_json(rows: Sequence[Row], about: dict[str, Any], to: Path) -> None:
    results = [asdict(row) | {"met": row.met} for row in rows]
    to.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


def draw(rows: Sequence[Row], to: Path) -> None:
    """A panel for each name of a panel, with a solid line for ours and a dashed one for theirs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(row.panel for row in rows if row.panel))
    if not panels:
        return
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        height, columns, figsize=(5 * columns, 3.8 * height), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, [row for row in rows if row.panel == panel])
    figure.suptitle("solid: this project   dashed: what it is compared with")
    figure.savefig(to, dpi=110)
    pyplot.close(figure)


def _draw_panel(axis: Any, panel: str, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row.series for row in rows))
    for number, name in enumerate(names):
        of_name = [row for row in rows if row.series == name]
        x = [row.x for row in of_name]
        axis.plot(x, [row.ours for row in of_name], f"C{number}o-", label=name)
        axis.plot(x, [row.theirs for row in of_name], f"C{number}x--", alpha=0.7)
    title, _, quantity = panel.partition(" by ")
    axis.set(title=title, xlabel=quantity, ylabel=rows[0].unit, xscale="log", yscale="log")
    ticks = sorted({row.x for row in rows})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.legend(fontsize=7)
