"""Logs of nvidia-smi: peak, average and mode by GPU, windows by steps and by hand, lines of every kind."""

# ruff: noqa: DTZ001 - logs state wall clocks without a zone

import os
from datetime import datetime, timedelta
from pathlib import Path
from threading import Thread

import pytest

from steptime.base.config import ConfigError
from steptime.bench.run_logs.gpu_memory import summarize
from steptime.bench.run_logs.samples import MIB, Tally
from steptime.report.bench_logs import log_line, memory_command
from steptime.report.table import Style, layout

LOG = str(Path(__file__).parents[1] / "data" / "bench" / "gpu_memory.csv")
HEADER = "timestamp, index, name, memory.used [MiB], memory.total [MiB]"


@pytest.fixture
def csv(tmp_path):
    """Writes a log and gives its path."""

    def write(*lines, end="\n"):
        path = tmp_path / "gpu.csv"
        path.write_text("\n".join(lines) + end)
        return str(path)

    return write


@pytest.fixture
def training(tmp_path):
    """A training log whose steps 0 to 2 are stamped as given; its path."""

    def write(*stamps, start="Job started at: 2023-10-05-235800 on x\n"):
        path = tmp_path / "train.log"
        path.write_text(start + "".join(f"{stamp} step={i}, loss=1\n" for i, stamp in enumerate(stamps)))
        return str(path)

    return write


def used(path, **window):
    """MiB of each GPU: peak, average, mode."""
    return {
        gpu.name: tuple(value / MIB for value in (gpu.peak_bytes, gpu.average_bytes, gpu.mode_bytes))
        for gpu in summarize(path, **window).gpus
    }


def text_of(sections):
    return "\n".join(line for section in sections for line in layout(section, Style()))


def test_the_published_line():
    document, sections = memory_command([LOG])
    expected = "[gpu_memory_log - GPU 0] Peak = 26532 MiB, Avg = 22458.63 MiB, Mode = 26532 MiB"
    assert log_line(summarize(LOG).gpus[0]) == expected
    assert document["gpu_memory"][0]["gpus"][0]["line"] == expected
    text = text_of(sections)
    for words in (
        "26,532",
        "22,458.63",
        "64.8 %",
        "27 of 27",
        "sampled every 5.000 s",
        "not tensors",
        "no window given",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


WINDOWS = [
    {"start": "23:59:20", "stop": "00:01:00"},
    {"start": "2023-10-05 23:59:20", "stop": "2023-10-06 00:01:00"},
    {"start": "23:59:20", "stop": "2023/10/06 00:01:00"},
]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_changes_the_average_not_the_peak(window):
    """20 samples, 23:59:20.123 to 00:00:55.123: 15272 once and 26532 nineteen times, 519,380 / 20 = 25,969."""
    document, sections = memory_command([LOG], **window)
    found = document["gpu_memory"][0]
    assert found["gpus"][0]["line"] == "[gpu_memory_log - GPU 0] Peak = 26532 MiB, Avg = 25969.00 MiB, Mode = 26532 MiB"
    assert (found["start"], found["stop"]) == ("2023-10-05T23:59:20", "2023-10-06T00:01:00")
    assert "20 of 27" in text_of(sections)
    assert "only samples from 2023-10-05 23:59:20 to 2023-10-06 00:01:00" in text_of(sections)


@pytest.mark.parametrize(
    "stamps",
    [
        ("[23:59:20]", "[00:00:05]", "[00:01:00]"),
        ("[2023-10-05 23:59:20]", "[2023-10-06 00:00:05]", "2023-10-06 00:01:00,000 - INFO"),
    ],
)
def test_a_window_from_the_steps_of_a_training_log(training, stamps):
    found = memory_command([LOG], log=training(*stamps))[0]["gpu_memory"][0]
    assert (found["start"], found["stop"]) == ("2023-10-05T23:59:20", "2023-10-06T00:01:00")
    assert [gpu["samples"] for gpu in found["gpus"]] == [20, 20]


def test_one_end_may_be_open():
    """From 23:59:20 on: 15272 and 22 times 26532, 23 of 27; up to 23:59:19: 3, 3, 497, 6904."""
    assert memory_command([LOG], start="23:59:20")[0]["gpu_memory"][0]["gpus"][0]["samples"] == 23
    early = memory_command([LOG], stop="23:59:19")[0]["gpu_memory"][0]["gpus"][0]
    assert early["average_bytes"] / MIB == (3 + 3 + 497 + 6904) / 4
    assert early["outside"] == 23


def test_days_are_counted_over_a_long_run(tmp_path, csv):
    """Steps every eight hours by the time of day alone, three days long."""
    first = datetime(2023, 10, 5, 22)
    stamps = [first + timedelta(hours=8 * i) for i in range(10)]
    log = tmp_path / "train.log"
    log.write_text("".join(f"[{stamp:%H:%M:%S}] step={i}, x\n" for i, stamp in enumerate(stamps)))
    path = csv(HEADER, *(f"{stamp:%Y/%m/%d %H:%M:%S}.500, 0, H100, {i}, 99" for i, stamp in enumerate(stamps)))
    found = memory_command([path], log=str(log))[0]["gpu_memory"][0]
    assert (found["start"], found["stop"]) == ("2023-10-05T22:00:00", "2023-10-08T22:00:00")
    assert found["gpus"][0]["samples"] == 9  # the last sample is half a second late


AT = "2023/10/05 19:12:15.123"
FORMS = {
    "units": (HEADER, f"{AT}, 0, H100, 300 MiB, 81559 MiB", f"{AT}, 0, H100, 100 MiB, 81559 MiB"),
    "nounits": (HEADER, f"{AT}, 0, H100, 300, 81559", f"{AT}, 0, H100, 100, 81559"),
    "no header": (f"{AT}, 0, H100, 300, 81559", f"{AT}, 0, H100, 100 MiB, 81559 MiB"),
    "other order": ("memory.used [MiB], index, timestamp", f"300, 0, {AT}", f"100, 0, {AT}"),
    "no time": ("index, memory.used [MiB]", "0, 300", "0, 100"),
    "GiB": ("index, memory.used [GiB]", "0, 0.29296875", "0, 0.09765625"),
    "joined logs": (HEADER, f"{AT}, 0, H100, 300, 81559", "memory.used [MiB], index", "100, 0"),
    "no values": (HEADER, f"{AT}, 0, H100, 300, 81559", f"{AT}, 0, H100, [N/A], [N/A]", f"{AT}, 0, H100, 100, [N/A]"),
    "other text": (HEADER, "srun: error", f"{AT}, 0, H100, 300, 81559", f"{AT}, 0, H100, 100, 81559", f"{AT}, 0, H1"),
}


@pytest.mark.parametrize("lines", FORMS.values(), ids=FORMS)
def test_forms_of_logs(csv, lines):
    """300 and 100 MiB each time; equally frequent, so the mode is the larger."""
    assert used(csv(*lines)) == {"0": (300, 200, 300)}


def test_lines_without_memory_are_counted(csv):
    found = summarize(csv(*FORMS["no values"]))
    assert found.unread == 1
    assert found.gpus[0].total_bytes == 81559 * MIB
    _, sections = memory_command([csv(*FORMS["other text"])])
    assert "2 lines without memory skipped" in text_of(sections)


@pytest.mark.parametrize(
    ("last", "kept"),
    [(f"{AT}, 0, H100, 26", False), (f"{AT}, 0, H100, 300, 8", True), (f"{AT}, 0, H1", False), (AT[:9], False)],
)
def test_a_last_line_that_was_cut(csv, last, kept):
    found = summarize(csv(HEADER, f"{AT}, 0, H100, 300, 81559", last, end=""))
    assert (found.gpus[0].samples, found.unread) == ((2, 0) if kept else (1, 1))
    assert found.gpus[0].average_bytes == 300 * MIB


@pytest.mark.parametrize(("cell", "samples"), [("26", 1), ("2653 MiB", 2), ("2653 Mi", 1)])
def test_a_last_cell_is_trusted_with_its_unit(csv, cell, samples):
    lines = ("timestamp, index, memory.used [MiB]", f"{AT}, 0, 26532", f"{AT}, 0, {cell}")
    assert summarize(csv(*lines, end="")).gpus[0].samples == samples
    assert summarize(csv(*lines)).gpus[0].samples == (1 if cell.endswith("Mi") else 2)


def test_gpus_stand_by_index(csv):
    path = csv(HEADER, *(f"{AT}, {i}, H100, {i}, 99" for i in (10, 2, 0)))
    assert list(used(path)) == ["0", "2", "10"]
    path = csv("uuid, memory.used [MiB]", "GPU-b, 1", "GPU-a, 2")
    assert list(used(path)) == ["GPU-a", "GPU-b"]
    assert "  GPU-a  " in text_of(memory_command([path])[1])


def test_a_pipe_can_be_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = Thread(target=path.write_text, args=("index, memory.used [MiB]\n0, 300\n0, 100\n",))
    writer.start()
    assert used(str(path)) == {"0": (300, 200, 300)}
    writer.join()


def test_a_tally_of_nothing():
    with pytest.raises(ValueError, match="no samples"):
        Tally("0").row()


@pytest.mark.parametrize(
    ("lines", "window", "problem"),
    [
        (["hello"], {}, "no samples of memory.used; expected columns timestamp,index,name,memory.used,memory.total"),
        ([HEADER], {}, "no samples of memory.used; expected columns timestamp,index,name,memory.used,memory.total"),
        (["timestamp, memory.used [MiB]", f"{AT}, 5"], {}, "no column identifies the GPU; add index to the query"),
        (FORMS["no time"], {"start": "19:12:15"}, "a window needs time stamps; add timestamp to the query"),
        (
            FORMS["units"],
            {"start": "19:12:16", "stop": "19:13:00"},
            "no sample in the window 2023-10-05 19:12:16 to 2023-10-05 19:13:00; first sample: 2023-10-05 19:12:15.123000",
        ),
        (
            FORMS["units"],
            {"start": "noon"},
            "--from: expected a time like 2023-10-05 19:12:15 or 19:12:15 (got 'noon')",
        ),
        (
            FORMS["units"],
            {"start": "2023-10-05 19:12:15", "stop": "2023-10-05 19:12:14"},
            "--to 2023-10-05 19:12:14: not after --from 2023-10-05 19:12:15",
        ),
    ],
)
def test_bad_input_is_one_line(csv, lines, window, problem):
    path = csv(*lines)
    with pytest.raises(ConfigError) as error:
        memory_command([path], **window)
    assert [line.removeprefix(f"{path}: ") for line in error.value.problems] == [problem]


def test_bad_windows_from_logs(training):
    with pytest.raises(ConfigError, match="fewer than two lines with step=N and a time stamp"):
        memory_command([LOG], log=training("[23:59:20]"))
    with pytest.raises(ConfigError, match="are both set; use one"):
        memory_command([LOG], log=training("[23:59:20]"), start="23:59:20")
    with pytest.raises(ConfigError, match=r"none\.csv: no such file"):
        memory_command(["none.csv"])
