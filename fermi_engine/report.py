"""What the commands print: consoles, sizes, progress and tables. Imports rich only when something is drawn."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160  # columns of a table in a file or pipe, where no terminal says how many there are
QUOTED_LENGTH = 40  # characters
PLAIN_INTERVAL_S = 5.0  # between progress lines that go to a file or pipe
UNITS = ("B", "kB", "MB", "GB", "TB")

Progress = Callable[[int, int, str], None]


def note(text: str) -> None:
    """One line to stderr; nowhere when that is closed, for print would take stdout then."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def quoted(text: str) -> str:
    """A word of the user's in quotes, cut where it is longer than a message should be."""
    return repr(text if len(text) <= QUOTED_LENGTH else text[:QUOTED_LENGTH] + "...")


def size(count: float) -> str:
    """Bytes in decimal units with three digits: 999 B, 1.53 GB."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    if unit == 0:
        return f"{count:.0f} B"
    return f"{count:.{max(0, 2 - (count >= 9.995) - (count >= 99.95))}f} {UNITS[unit]}"


def rate(count: int, seconds: float) -> str:
    """Tokens per second, or `-` where nothing was timed."""
    return f"{count / seconds:.1f} tok/s" if count and seconds > 0 else "- tok/s"


def console(file: TextIO) -> Console:
    """A console that prints names as they are (no markup) and does not squeeze tables into an unknown width."""
    from rich.console import Console

    width = None if file.isatty() else PLAIN_WIDTH
    return Console(file=file, width=width, markup=False, highlight=False, emoji=False)


def json_document(value: Any) -> None:
    """One JSON document on stdout; a number that JSON lacks becomes null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Print a table to stdout; `right` names the columns aligned to the right. A row may end with a rich style name
    beyond its last column."""
    from rich import box
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        cells = [str(cell) for cell in row]
        drawn.add_row(*cells[: len(columns)], style=cells[len(columns)] if len(cells) > len(columns) else None)
    _draw(drawn)


def facts(title: str, values: Mapping[str, Any]) -> None:
    """Print `name value` lines under a title."""
    from rich.table import Table

    drawn = Table(title=title or None, title_justify="left", box=None, pad_edge=False, show_header=False)
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in values.items():
        drawn.add_row(name, str(value))
    _draw(drawn)


def _draw(drawn: Any) -> None:
    """To stdout; in a file or pipe without the spaces that pad lines to equal length."""
    out = console(sys.stdout)
    if out.is_terminal:
        out.print(drawn)
        return
    with out.capture() as captured:
        out.print(drawn)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def progress(label: str, unit: str = "bytes") -> Iterator[Progress]:
    """`report(done, total, name)` for a long job: a bar on stderr where that is a terminal, else a line now and then.

    unit: 'bytes' or 'tokens'. A job that never reports prints nothing.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield plain_progress(label, unit, note)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
               TextColumn("{task.fields[amount]}"), TimeRemainingColumn(),
               TextColumn("{task.fields[item]}", markup=False))
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(label, total=None, amount="", item="", visible=False)

        def report(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, amount=_amount(done, total, unit), item=name, visible=True)

        yield report


def plain_progress(label: str, unit: str, write: Callable[[str], None],
                   clock: Callable[[], float] = time.monotonic) -> Progress:
    """Progress as lines: one each PLAIN_INTERVAL_S, so that a short job prints none."""
    last = clock()

    def report(done: int, total: int, name: str) -> None:
        nonlocal last
        if clock() - last >= PLAIN_INTERVAL_S:
            last = clock()
            write(f"{label}: {100 * done // max(1, total)}% ({_amount(done, total, unit)}) {name}".rstrip())

    return report


def _amount(done: int, total: int, unit: str) -> str:
    return f"{size(done)} of {size(total)}" if unit == "bytes" else f"{done} of {total} {unit}"
