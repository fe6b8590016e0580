"""What both commands use: exit codes, signals, logging and progress."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from .errors import DatapipeError, SettingError, ShardCorruptError, WrongPathError

logger = logging.getLogger(__name__)

NO_ROOM = errno.ENOSPC, errno.EDQUOT
AGAIN_S = 0.05  # by then the callback has ended
LOG_EVERY_S = 30.0  # a batch log gets one line of progress this often
_OURS = "datapipe", "trainer"  # whose log messages are a single line each


def run(command: Callable[[], object], name: str = "", is_informing: bool = True) -> int:
    """Run a command line.

    SIGTERM unwinds the stack as Ctrl-C does, so that no file is left half-written under its final name. Characters
    that the terminal's encoding does not have (× in ASCII, a file's name that is not UTF-8) are printed escaped. So are
    those that a terminal would act on, in log lines, errors and tracebacks, which may quote what others wrote.

    Args:
        command: Function to run.
        name: Name of this process in the log, such as "rank 3"; "" if it is the only one.
        is_informing: Whether it logs more than warnings; of several at the same work, one does.

    Returns:
        The exit code: 0 success, 1 data or a check failed, 2 usage.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s {name and f'{name} '}%(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO if is_informing else logging.WARNING, handlers=[handler])
    sys.excepthook = _print_exception
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with _sending_again():
            command()
    except (SettingError, WrongPathError) as error:
        return _fail(error, 2)
    except (DatapipeError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as stop:  # how the command-line library ends, after most Ctrl-Cs as well
        if stop.code == 128 + signal.SIGINT:
            return _interrupted()
        if stop.code == 128 + signal.SIGTERM:
            print("terminated", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _sending_again() -> Iterator[None]:
    """Send a signal again whose exception Python has dropped: it came within a destructor, or a callback of weakref."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        number = raised_by_signal(dropped.exc_value)
        if number is None:
            before(dropped)
            return
        is_within_hook = threading.Lock()

        def send_again() -> None:
            with is_within_hook:
                time.sleep(AGAIN_S)
            os.kill(os.getpid(), number)

        with is_within_hook:  # on a busy machine it may take longer than that, and what comes in here is dropped, too
            threading.Thread(target=send_again, name="signal", daemon=True).start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def raised_by_signal(error: BaseException | None) -> int | None:
    """Return the number of the signal whose handler has raised this; None where none has."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return error.code - 128
    return None


def _fail(error: Exception, code: int) -> int:
    escape = printable_lines if getattr(error, "has_lines", False) else printable
    print(f"error: {escape(str(error))}{_advice(error)}", file=sys.stderr)
    return code


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Take the place of `sys.excepthook`: a traceback ends with a message, which may quote what others wrote."""
    print(printable_lines("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def _advice(error: Exception) -> str:
    """Say what to do about an error whose text does not: what was added as a note to it, or what is so in general."""
    notes = getattr(error, "__notes__", [])
    if notes:
        return "; " + "; ".join(notes)
    if isinstance(error, ShardCorruptError):
        return "; `datapipe verify DIR` names all damage of a data set"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return "; run the same command again when there is room"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "; choose a folder that can be written to"
    return ""


def format_count(number: int, thing: str, things: str = "") -> str:
    """Return a number of things in words.

    Args:
        number: Number of things, 0 or more.
        thing: Name of the thing that is counted, in the singular.
        things: Plural of the name, if that is not `thing` and an s.
    """
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def format_some(names: Sequence[str], most: int = 3) -> str:
    """Return some of many names in words, at most `most` of them.

    >>> format_some(["a", "b", "c", "d"]), format_some(["a", "b"])
    ('a, b, c, …', 'a, b')
    """
    return ", ".join(names[:most]) + ", …" * (len(names) > most)


def printable(text: str) -> str:
    r"""Escape what a terminal would act on in a text that others wrote, such as a file's name.

    A no-break space stays: it stands before per cent signs.

    >>> printable("a\x1b[2Jb.jpg")
    'a\\x1b[2Jb.jpg'
    """
    return "".join(
        c if c.isprintable() or c == "\N{NO-BREAK SPACE}" else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def printable_lines(text: str) -> str:
    r"""Do what `printable` does, and keep line breaks: for a text of several lines, whose parts have none of their own.

    >>> printable_lines("a\x1b[2J\nb")
    'a\\x1b[2J\nb'
    """
    return "\n".join(map(printable, text.split("\n")))


def print_lines(*lines: object) -> None:
    """Print lines, escaped by `printable`: each may name files, folders or classes that others have named."""
    for line in lines:
        print(printable(str(line)), flush=True)


class _Formatter(logging.Formatter):
    """A log's lines, escaped: nothing in a file's name acts on a terminal, or begins a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        escape = printable if record.name.partition(".")[0] in _OURS else printable_lines
        record.message = escape(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))


class Progress:
    """The progress of a piece of work: a bar on a terminal, elsewhere a log line every half minute.

    Args:
        what: Work that is done, in words for the reader.
        total: Number of units.
        unit: Name of the things that are counted, in the plural.
        is_shown: Whether this process shows it; of several at the same work, one does.
    """

    def __init__(self, what: str, total: int, unit: str = "images", is_shown: bool = True) -> None:
        self.what, self.total, self.unit, self._is_shown = printable(what), total, unit, is_shown
        self.done = 0
        self._started = self._logged = time.monotonic()
        self._bar = None
        if is_shown and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),  # a name in brackets is a name
                progress.BarColumn(),
                progress.TextColumn("{task.fields[rate]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self.what, total=total, rate="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int = 1) -> None:
        """Count more units that are done."""
        self.done += count
        now = time.monotonic()
        rate = f"{_short(self.done / max(now - self._started, 1e-9))} {self.unit}/s"
        if self._bar:
            self._bar.update(self._task, advance=count, rate=rate)
        elif self._is_shown and now - self._logged > LOG_EVERY_S:
            self._logged = now
            logger.info("%s: %s of %s %s, %s", self.what, _short(self.done), _short(self.total), self.unit, rate)


def _short(number: float) -> str:
    for unit, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 10 * unit:
            return f"{number / unit:.0f}{suffix}"
    return f"{number:.0f}"
