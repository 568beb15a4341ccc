"""Time stamps of log lines, job scripts and file names, and the seconds between them."""

# ruff: noqa: DTZ001 - logs state wall clocks without a zone

from datetime import datetime, time, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.bench.run_logs.stamps import dated, elapsed, following, nearest, of_line


@pytest.mark.parametrize(
    "text",
    [
        "2023-10-05-191101 on nid008217",
        "2023-10-05-19:11:01",
        "2023-10-05_19-11-01",
        "2023/10/05 19:11:01",
        "2023-10-05 19:11:01,000 - INFO",
        "[2023-10-05 19:11:01.000]",
        "2023-10-05T19:11:01",
        "20231005T191101",
        "20231005-191101-0042",
        "Thu Oct  5 19:11:01 PDT 2023",
        "Thu Oct  5 07:11:01 PM UTC 2023",
    ],
)
def test_stamps_with_a_date(text):
    assert dated(text) == datetime(2023, 10, 5, 19, 11, 1)


def test_zones_count_where_both_stamps_state_one():
    start, stop = dated("2023-10-05T19:11:01-07:00"), dated("2023-10-06T02:12:01Z")
    assert start == datetime(2023, 10, 5, 19, 11, 1, tzinfo=timezone(timedelta(hours=-7)))
    assert elapsed(start, stop) == 60
    assert elapsed(start, datetime(2023, 10, 5, 19, 12, 1)) == 60  # the same wall clock


@pytest.mark.parametrize(
    "text", ["2023-13-05-191101", "2023-10-05-251101", "2023-10-05", "out/2023-10-05-191101/x", "", "19:11"]
)
def test_what_is_no_stamp(text):
    assert dated(text) is None


@pytest.mark.parametrize(
    ("line", "stamp"),
    [
        ("[19:12:15] INFO", time(19, 12, 15)),
        ("[10/05/23 19:12:15] INFO", time(19, 12, 15)),
        ("I1005 19:12:15.123456 7 main.cc]", time(19, 12, 15, 123456)),
        ("0: 2023-10-05 19:12:15,123 - INFO", datetime(2023, 10, 5, 19, 12, 15, 123000)),
        ("[19:12:15] resumed from 2023-10-01 00:00:00", time(19, 12, 15)),
        ("25:12:15 no time", None),
        ("nothing", None),
    ],
)
def test_stamps_of_lines(line, stamp):
    assert of_line(line) == stamp


def test_a_lines_stamp_stands_ahead_of_the_step_or_is_a_date():
    line = "step=0, took 00:00:07, at 2023-10-05 19:12:15"
    assert of_line(line, 0) == datetime(2023, 10, 5, 19, 12, 15)
    assert of_line("step=0, took 00:00:07", 0) is None


moments = st.datetimes(datetime(2000, 1, 1), datetime(2099, 1, 1))
seconds = st.integers(0, 86399)


@given(moments, st.timedeltas(timedelta(0), timedelta(seconds=86399)))
def test_times_of_day_give_the_right_difference_for_less_than_a_day(start, gap):
    stop = start + gap
    for a, b in ((start, stop), (start, stop.time()), (start.time(), stop.time()), (start.time(), stop)):
        assert elapsed(a, b) == gap.total_seconds()


@given(moments, st.timedeltas(timedelta(hours=-12) + timedelta.resolution, timedelta(hours=12)))
def test_the_nearest_time_of_day(moment, gap):
    assert nearest((moment + gap).time(), moment) == moment + gap


@given(moments.map(lambda moment: moment.replace(microsecond=0)), seconds)
def test_stamps_in_logs_come_back(start, gap):
    stop = start + timedelta(seconds=gap)
    assert elapsed(dated(f"at: {start:%Y-%m-%d-%H%M%S} on x"), of_line(f"[{stop:%H:%M:%S}] INFO")) == gap
    assert elapsed(dated(f"{start}"), of_line(f"{stop},007 - INFO")) == pytest.approx(gap + 0.007)


def test_whole_seconds_may_lie_behind_a_fraction_of_the_same_second():
    assert elapsed(datetime(2023, 10, 5, 19, 11, 1, 600000), datetime(2023, 10, 5, 19, 11, 1)) == 0
    assert elapsed(time(19, 11, 1, 600000), time(19, 11, 1)) == 0


@given(moments, st.timedeltas(timedelta(0), timedelta(days=1) - timedelta.resolution))
def test_the_following_time_of_day(moment, gap):
    assert following((moment + gap).time(), moment) == moment + gap
