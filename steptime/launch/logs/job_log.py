"""Reading the logs of one training job, of any size, in bounded memory: only the lines of an argument dump are kept.

Lines end at a line feed or, for progress bars, at a carriage return; a long line is cut. Files of
several nodes and of restarts are read one after the other into one `JobLog`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path

from steptime.base.config import ConfigError
from steptime.launch.logs import entries, lines
from steptime.launch.logs.files import open_plain, pieces
from steptime.launch.logs.logged_steps import LoggedSteps
from steptime.launch.logs.printed_config import read_dump

HEAD = 900_000
"""Bytes of the beginning that are kept, for the readers of configs printed there."""
DUMP_LINES = 20_000
"""Most lines between the two marks of an argument dump: one per flag, with lines of other ranks in between."""
PAUSES = 100_000
"""Most evaluations and checkpoints, and most restarts, that are recorded."""
_HALF = 0.0005
"""Half of the last digit of the Trainer's rates."""

BEGINS, ENDS = b" arguments -----", b" end of arguments -----"
"""Marks of Megatron's argument dump (megatron/training/arguments.py, _print_args)."""

PRINTED = re.compile(rb"Running with (?:args|configs): \{|Task Configuration|Experiment configuration \*+")
"""Headings under which torchtitan, Megatron-Bridge and NeMo print their config."""

TellProgress = Callable[[str, float], None]
"""Called with the file and the share of it that is read."""


class JobLog:
    """The contents of one job's logs.

    Iterations are held once each (`series`), memory peaks by rank, and the first argument dump, with the values that differ in
    later ones.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.framework = ""
        """Origin of the iterations' lines."""
        self.titan: dict[bool, str] = {}
        """The first file with iterations of torchtitan (True), and of Megatron-LM and its forks, which share line formats
        (False)."""
        self.series = LoggedSteps()
        self.timer = LoggedSteps()
        """Iterations of DeepSpeed's timer, which leaves out what the training loop does between its steps."""
        self.whole = LoggedSteps()
        """A line for each run of the Trainer, with its mean."""
        self.whole_batch: tuple[float, float] | None = None
        """Samples of a step by the last such line, least and most that its rounded rates allow; None where none says."""
        self.loop = False
        """Whether the training loop logs its step times itself; a progress bar's rate is a mean."""
        self.timed_per_step = 0.0
        """Micro-batches of a step that DeepSpeed's timer has stopped after; 0 where the log does not say."""
        self.unnumbered = LoggedSteps()
        """Megatron-Bridge's lines without an iteration number, by their position."""
        self.allocated: dict[int, float] = {}
        """Peak allocated memory [B] by rank; -1 where the log does not name it."""
        self.reserved: dict[int, float] = {}
        self.local_ranks = False
        """Whether the ranks are local ranks of a node."""
        self.parameters: dict[tuple[int, int], int] = {}
        """Parameters by (tensor, pipeline) rank."""
        self.vocabulary: entries.Vocabulary | None = None
        self.zero_stage: int | None = None
        self.device, self.devices = "", 0
        """Processes of the job; 0 where the log does not say."""
        self.pauses: set[int] = set()
        """Iterations before an evaluation or a checkpoint."""
        self.starts: set[int] = set()
        """First logged iterations: of the job, and after each restart."""
        self.arguments: dict[str, str] | None = None
        """The first complete argument dump."""
        self.arguments_file = ""
        self.contradictions: list[tuple[str, dict[str, str]]] = []
        """File and argument -> value, for later dumps with different values."""
        self.cut_dump: ConfigError | None = None
        """A truncated dump."""
        self.head = bytearray()
        """The beginning of the first file, or the part where the config is printed, if later."""
        self.notes: list[str] = []

    def take(self, entry: entries.LogEntry, file: FileState) -> None:
        """Record the contents of a line."""
        match entry:
            case entries.Iteration():
                self._iteration(entry, file)
            case entries.MemoryPeak():
                self.local_ranks = self.local_ranks or (entry.local and entry.rank >= 0)
                for peaks, value in ((self.allocated, entry.allocated_bytes), (self.reserved, entry.reserved_bytes)):
                    if value:
                        peaks[entry.rank] = max(value, peaks.get(entry.rank, 0.0))
            case entries.Pause():
                if len(self.pauses) < PAUSES and (number := file.latest if entry.number < 0 else entry.number) >= 0:
                    self.pauses.add(number)
            case entries.ParameterCount():
                self.parameters[entry.tp_rank, entry.pp_rank] = entry.parameters
            case entries.Vocabulary():
                self.vocabulary = entry
            case entries.ZeroStage():
                self.zero_stage = entry.stage
            case entries.WorldSize():
                self.devices = self.devices or entry.devices
            case entries.AcceleratorName():
                self.device = self.device or entry.name
            case entries.WholeRun():
                if (whole := file.with_row(entry)).seconds and whole.steps_per_s:
                    self._whole_run(whole, file)
            case entries.RunLength():
                file.steps, file.done = entry.steps or file.steps, entry.done

    def _iteration(self, entry: entries.Iteration, file: FileState) -> None:
        self.titan.setdefault(entry.framework == "torchtitan", self.files[-1])
        if entry.number < 0:
            self.unnumbered.add(entry, file.unnumbered)
            file.unnumbered += 1
            return
        self.framework = self.framework or entry.framework
        before = file.streams.get(entry.stream)
        if (before is None or entry.number < before) and len(self.starts) < PAUSES:
            self.starts.add(entry.number)
        file.streams[entry.stream] = file.latest = entry.number
        self.loop = self.loop or not (entry.samples_per_s or entry.framework in {"Hugging Face Trainer", "Lightning"})
        if entry.timed and entry.number:
            self.timed_per_step = entry.timed / entry.number
        series = self.timer if entry.samples_per_s else self.series
        series.add(file.with_own_step(entry) if entry.mean_s else entry, entry.number)

    def _whole_run(self, entry: entries.WholeRun, file: FileState) -> None:
        """The mean of a run; its steps are those announced, where the rate, rounded to 3 digits, is that of so many.

        The Trainer divides the steps of the whole run, also of one that was continued, by the time since its last start.
        """
        by_rate = entry.seconds * entry.steps_per_s
        announced = abs(file.steps - by_rate) <= 0.5 + 0.0005 * entry.seconds
        steps = (file.steps if announced else by_rate) - file.done
        if steps > 0.0:
            self.framework = self.framework or "Hugging Face Trainer"
            self.whole.add(entries.Iteration("", round(steps), entry.seconds / steps), round(steps))
            if entry.samples_per_s and entry.steps_per_s > _HALF:
                low = (entry.samples_per_s - _HALF) / (entry.steps_per_s + _HALF)
                self.whole_batch = low, (entry.samples_per_s + _HALF) / (entry.steps_per_s - _HALF)

    @property
    def steps(self) -> LoggedSteps:
        """The iterations to use: the training loop's own, else DeepSpeed's timer's, progress bars', the mean of the run."""
        if not len(self.series) and not len(self.timer):
            return self.whole
        return self.series if self.loop or not len(self.timer) else self.timer

    @property
    def job_devices(self) -> int:
        """Processes of the job, also by its arguments; 0 where the log does not say, or another process printed into the line."""
        said = (self.arguments or {}).get("world_size", "")
        return self.devices or (int(said) if re.fullmatch(r"\d{1,9}", said) else 0)

    def dump(self, text: list[str], name: str, begin: int) -> None:
        """Record an argument dump, which begins on line `begin` of its file."""
        try:
            found = read_dump(chain(repeat("", begin - 1), text))  # messages tell lines of the file
        except ConfigError as error:
            self.cut_dump = self.cut_dump or ConfigError(f"{name}: {problem}" for problem in error.problems)
            return
        if self.arguments is None:
            self.arguments, self.arguments_file = found, name
        changed = {key: value for key, value in found.items() if self.arguments.get(key) != value}
        if changed and len(self.contradictions) < 100:
            self.contradictions.append((f"{name}: line {begin}" if name == self.arguments_file else name, changed))


class FileState:
    """State of reading one file."""

    def __init__(self) -> None:
        self.streams: dict[str, int] = {}
        """Last iteration by rank prefix."""
        self.latest = -1
        self.steps = self.done = 0
        """Steps that the Trainer announces for the run, and those before it was continued; 0 where it does not."""
        self.rows_so_far = entries.WholeRun(0.0, 0.0)
        self.unnumbered = 0
        self.began, self.before, self.elapsed_s = 0, -1, 0.0
        """Of a log that prints means: the iteration that the run began after, the one logged last, and its time."""
        self.dump: list[str] | None = None
        """Lines of a dump that has not ended yet."""
        self.line = self.begin = 0
        """The current line, and the line on which the dump began."""

    def with_row(self, row: entries.WholeRun) -> entries.WholeRun:
        """A run of one line as it is; one row of a table with those before it, of which the steps a second are the last."""
        if row.seconds and row.steps_per_s:
            return row
        found = entries.WholeRun(*(new or old for new, old in zip(row, self.rows_so_far, strict=True)))
        self.rows_so_far = entries.WholeRun(0.0, 0.0) if row.steps_per_s else found
        return found

    def with_own_step(self, line: entries.Iteration) -> entries.Iteration:
        """A line that prints the mean since the run began, with the step time since the line before it."""
        if line.number <= self.before or self.before < 0:  # the run's first line; whole seconds tell where it began
            began = line.number - line.elapsed_s / line.mean_s
            self.began, self.before = (round(began) if began > 2.0 + 2.0 / line.mean_s else 0), -1
        elapsed_s = line.mean_s * (line.number - self.began)
        if self.before >= 0 and elapsed_s > self.elapsed_s:
            line = line._replace(step_s=(elapsed_s - self.elapsed_s) / (line.number - self.before))
        self.before, self.elapsed_s = line.number, elapsed_s
        return line


def read_log(paths: Iterable[str], progress: TellProgress | None = None) -> JobLog:
    """The logs of one job: node files, and restarts in any order.

    Raises:
        ConfigError: a file cannot be read, or no file logs an iteration: one line.
    """
    log = JobLog()
    for path in paths:
        name = str(path)
        if name in log.files:
            raise ConfigError(f"{name}: given more than once")
        log.files.append(name)
        _read_file(log, name, progress)
    if len(log.titan) > 1:
        two = f"{log.titan[True]}: is a torchtitan log, {log.titan[False]} is not: logs of two jobs"
        raise ConfigError(f"{two}; give the logs of one job")
    if log.steps is log.whole and len(log.whole):
        log.notes.append(
            "the log has no step times, only the mean of the whole run, with its start, evaluations, checkpoints"
        )
    if not len(log.steps) and not len(log.unnumbered):
        if log.cut_dump is not None:
            raise log.cut_dump
        if b"\0" in log.head:
            raise ConfigError(f"{log.files[0]}: not a text file (NUL byte); give the log of a training run")
        files = ", ".join(log.files)
        rows = "; a CSV of measured runs is for 3dtrn validate --measurements" if ".csv" in files else ""
        raise ConfigError(f"{files}: no iterations logged; give the log of a training run (with step times){rows}")
    return log


def _read_file(log: JobLog, name: str, progress: TellProgress | None) -> None:
    state = FileState()
    for state.line, line in enumerate(_lines(name, log, progress), 1):
        if len(log.files) == 1:
            _hold(log, line)
        if state.dump is not None or BEGINS in line:
            _dump_line(log, state, line, name)
        for entry in lines.said(line):
            log.take(entry, state)
    if state.dump is not None:
        log.dump(state.dump, name, state.begin)


def _hold(log: JobLog, line: bytes) -> None:
    """Keep a line of the beginning; after it, start again where the config is printed."""
    full = len(log.head) >= HEAD and (b"onfig" in line or b" args: {" in line)
    if full and PRINTED.search(line) and not PRINTED.search(log.head):
        log.head.clear()
    if len(log.head) < HEAD:
        log.head += line + b"\n"


def _dump_line(log: JobLog, state: FileState, line: bytes, name: str) -> None:
    """One line of an argument dump, or the mark that starts one."""
    if BEGINS in line and ENDS not in line:
        if state.dump is not None:  # the previous one has no end
            log.dump(state.dump, name, state.begin)
        state.dump, state.begin = [], state.line
        state.streams.clear()
    if state.dump is None:
        return
    state.dump.append(line[:4096].decode("utf-8", "replace"))
    if ENDS in line or len(state.dump) >= DUMP_LINES:
        log.dump(state.dump, name, state.begin)
        state.dump = None


def _lines(name: str, log: JobLog, progress: TellProgress | None) -> Iterator[bytes]:
    """The lines of a file, plain or gzip; a truncated one is read up to its end, which is recorded."""
    try:
        with open_plain(name) as file:
            size = Path(name).stat().st_size
            for chunk in pieces(file):
                yield from chunk
                if progress is not None and size:
                    progress(name, os.lseek(file.fileno(), 0, os.SEEK_CUR) / size)
    except EOFError:
        log.notes.append(f"{name}: the gzip file is truncated; read up to there")
