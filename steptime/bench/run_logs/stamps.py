"""Time stamps in text: when a log line, a job script or a file name was written.

A stamp is a `datetime` where the date is there too, a `time` where only the time of day is. Seconds between two stamps are
always differences of times, never of the digits HHMMSS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, time, timedelta

from steptime.base.document import unreadable

Stamp = datetime | time

DAY = timedelta(days=1)
_LONGEST = 1 << 16
"""Bytes of a line that are read; anything beyond is not a log line's text."""
_CHUNK = 1 << 20

# 2023-10-05-191101, 2023-10-05 19:12:15,123, 2023/10/05 19:12:15.123, 20231005T191215, 2023-10-05T19:12:15.5-07:00
_DATED = (
    r"(?P<year>(?:19|20)\d\d)(?P<d>[-/.]?)(?P<month>\d\d)(?P=d)(?P<day>\d\d)[T _-]"
    r"(?P<hour>\d\d)(?P<t>[:.-]?)(?P<minute>\d\d)(?P=t)(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?(?!\d)"
    r"(?: ?(?P<zone>Z\b|[+-]\d\d:?\d\d\b))?"
)
_IN_TEXT = re.compile(r"(?<![\w/.-])" + _DATED)
_IN_NAME = re.compile(r"(?<!\d)" + _DATED)
# Thu Oct  5 19:11:01 PDT 2023: output of `date`
_DATE_COMMAND = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? (?P<month>[A-Z][a-z]{2}) +(?P<day>\d{1,2}) "
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d) (?:(?P<half>[AP]M) )?(?:[A-Z]{2,5} |[+-]\d\d )?(?P<year>\d{4})\b"
)
_TIME_OF_DAY = re.compile(
    r"(?<![\d:.])(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?(?![\d:])"
)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read_lines(path: str) -> Iterator[str]:
    """The lines of a log that contain text, one by one, in bounded memory: invalid UTF-8 is replaced, colors are removed.

    A carriage return ends a line too (progress bars); of a line longer than 64 KiB the beginning is read.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - "-" and odd names go to the operating system as they are
            rest = b""
            while chunk := file.read(_CHUNK):
                *whole, rest = re.split(rb"[\r\n]+", rest + chunk)
                yield from (_decode(line) for line in whole if line)
                rest = rest[:_LONGEST]
            if rest:
                yield _decode(rest)
    except OSError as error:
        raise unreadable(path, error) from None


def _decode(line: bytes) -> str:
    text = line[:_LONGEST].decode("utf-8", "replace")
    return _COLOURS.sub("", text) if b"\x1b" in line else text


def dated(text: str) -> datetime | None:
    """The first stamp with a date in a text; a date inside a path does not count.

    >>> dated("Job started at: 2023-10-05-191101 on nid008217")
    datetime.datetime(2023, 10, 5, 19, 11, 1)
    """
    if found := _IN_TEXT.search(text):
        return _datetime(found)
    if found := _DATE_COMMAND.search(text):
        return _from_date_command(found)
    return None


def in_name(name: str) -> datetime | None:
    """The last stamp in a file's name.

    >>> in_name("foremans-nid008217-nhosts2-ngpu8-2023-10-05-191101.log")
    datetime.datetime(2023, 10, 5, 19, 11, 1)
    """
    stamps = [stamp for found in _IN_NAME.finditer(name) if (stamp := _datetime(found))]
    return stamps[-1] if stamps else None


def of_line(line: str, before: int | None = None) -> Stamp | None:
    """The stamp of a log line: the first before position `before`, else the first date after it.

    >>> of_line("[19:12:15] step=0, took 00:00:05")
    datetime.time(19, 12, 15)
    """
    head = line if before is None else line[:before]
    clock = _TIME_OF_DAY.search(head)
    stamp = _IN_TEXT.search(head)
    if stamp and (clock is None or stamp.start() <= clock.start()):
        return _datetime(stamp)
    named = _DATE_COMMAND.search(head)
    if named and clock and named.start() <= clock.start():
        return _from_date_command(named)
    if clock:
        return _time(clock)
    return dated(line[before:]) if before is not None else None


def elapsed(start: Stamp, stop: Stamp) -> float:
    """Seconds from one stamp to a later one; where a date is missing, less than a day (so across midnight too).

    Negative only where both have a date and the second is the earlier. Zones count where both state one; else both stamps
    are taken for the same wall clock. A stamp in whole seconds may lie behind an earlier one of the same second: 0.

    >>> elapsed(time(23, 59, 59), time(0, 0, 1))
    2.0
    """
    if isinstance(start, datetime) and isinstance(stop, datetime):
        if (start.tzinfo is None) != (stop.tzinfo is None):
            start, stop = start.replace(tzinfo=None), stop.replace(tzinfo=None)
        gap = stop - start
    else:
        gap = _of_day(stop) - _of_day(start)
    if timedelta(seconds=-1) < gap < timedelta(0) and stop.microsecond == 0:
        return 0.0
    if not (isinstance(start, datetime) and isinstance(stop, datetime)):
        gap %= DAY
    return gap.total_seconds()


def nearest(stamp: Stamp, to: datetime) -> datetime:
    """A stamp with a date; a time of day becomes the nearest one to `to`, at most twelve hours away.

    >>> nearest(time(0, 0, 5), datetime(2023, 10, 5, 23, 59, 55))
    datetime.datetime(2023, 10, 6, 0, 0, 5)
    """
    if isinstance(stamp, datetime):
        return stamp.replace(tzinfo=None)
    gap = (_of_day(stamp) - _of_day(to)) % DAY
    return to.replace(tzinfo=None) + (gap if gap <= DAY / 2 else gap - DAY)


def following(stamp: Stamp, after: datetime) -> datetime:
    """A stamp with a date; a time of day is the first at or after `after`.

    >>> following(time(0, 0, 5), datetime(2023, 10, 5, 23, 59, 55))
    datetime.datetime(2023, 10, 6, 0, 0, 5)
    """
    if isinstance(stamp, datetime):
        return stamp.replace(tzinfo=None)
    return after.replace(tzinfo=None) + (_of_day(stamp) - _of_day(after)) % DAY


def _of_day(stamp: Stamp) -> timedelta:
    return timedelta(hours=stamp.hour, minutes=stamp.minute, seconds=stamp.second, microseconds=stamp.microsecond)


def _time(found: re.Match[str]) -> time | None:
    try:
        return time.fromisoformat(_clock(found))
    except ValueError:
        return None


def _datetime(found: re.Match[str]) -> datetime | None:
    zone = (found["zone"] or "") if found["t"] == ":" else ""  # 2023-10-05-191101-0042 has no zone
    try:
        return datetime.fromisoformat(f"{found['year']}-{found['month']}-{found['day']}T{_clock(found)}{zone.strip()}")
    except ValueError:
        return None


def _clock(found: re.Match[str]) -> str:
    return f"{found['hour']}:{found['minute']}:{found['second']}.{found['fraction'] or 0}"


def _from_date_command(found: re.Match[str]) -> datetime | None:
    """Zone names are dropped: most mean several zones, and logs of one job share the clock."""
    words = [found[name] for name in ("year", "month", "day", "hour", "minute", "second")]
    try:
        if found["half"]:
            return datetime.strptime(" ".join([*words, found["half"]]), "%Y %b %d %I %M %S %p")  # noqa: DTZ007
        return datetime.strptime(" ".join(words), "%Y %b %d %H %M %S")  # noqa: DTZ007
    except ValueError:
        return None
