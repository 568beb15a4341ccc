"""Time limits of `3dtrn serve`, and how many requests and connections it has at once."""

from __future__ import annotations

import socket
import time

import pytest
from served import ask, exchange, serving

from steptime.serve import server


@pytest.fixture(scope="module")
def running():
    with serving() as made:
        yield made


def test_an_estimate_that_takes_too_long_is_ended():
    def slow():
        while True:
            sum(range(1000))

    began = time.monotonic()
    with pytest.raises(server.OverTimeError), server.deadline(0.2):
        slow()
    assert time.monotonic() - began < 5.0


class Timer:
    """A timer whose time is up when the test says so."""

    def __init__(self, seconds, ends):
        self.seconds, self.ends, self.cancelled = seconds, ends, False

    def start(self):
        pass

    def cancel(self):
        self.cancelled = True


def test_a_deadline_ends_its_block_and_nothing_after_it(monkeypatch):
    """Time that is up as the block ends, before its timer is cancelled, is no exception in what follows."""
    timers = []

    def late(timer):
        timer.ends()
        return sum(i for i in range(1000))

    monkeypatch.setattr(server.threading, "Timer", lambda *given: timers.append(Timer(*given)) or timers[-1])
    with pytest.raises(server.OverTimeError), server.deadline(0.01):
        late(timers[0])
    with server.deadline(0.01):
        pass
    assert late(timers[1]) == 499_500
    assert [(timer.seconds, timer.cancelled) for timer in timers] == [(0.01, True)] * 2


def test_a_silent_connection_is_closed(running, monkeypatch):
    monkeypatch.setattr(server.Handler, "timeout", 0.2)
    with socket.create_connection(running.server_address[:2], timeout=5) as quiet:
        quiet.sendall(b"GET / HTTP/1.1\r\n")
        assert quiet.recv(100) == b""


POST = (
    b"POST /estimate HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
)


@pytest.mark.parametrize("head", [b"GET /", b"GET / HTTP/1.1\r\nA: ", POST])
def test_a_request_that_trickles_in_is_cut_off(running, monkeypatch, head):
    """Each byte comes in time; the whole does not. 1,000 bytes would take 50 s."""
    monkeypatch.setattr(server, "ARRIVAL_SECONDS", 0.25)
    began = time.monotonic()
    with socket.create_connection(running.server_address[:2], timeout=0.05) as slow:
        slow.sendall(head.replace(b"%d", b"%d" % running.server_address[1]))
        for _ in range(1000):
            try:
                slow.sendall(b"a")
                if slow.recv(1000) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert 0.2 < time.monotonic() - began < 9.0


def test_more_connections_than_there_is_room_for_are_closed(monkeypatch):
    """What has room goes on, and ended connections make room."""
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    with serving() as made:
        kept = [socket.create_connection(made.server_address[:2], timeout=5) for _ in range(2)]
        with socket.create_connection(made.server_address[:2], timeout=5) as third:
            assert third.recv(100) == b""
        kept[0].sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % made.server_address[1])
        assert kept[0].recv(100).startswith(b"HTTP/1.1 200 ")
        for one in kept:
            one.close()
        end = time.monotonic() + 10.0
        while made.room._value < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert exchange(made, "GET", "/")[0].status == 200


def test_an_answer_that_nobody_reads_holds_no_slot(running, monkeypatch):
    free, reply = [], server.Handler.reply
    monkeypatch.setattr(server.Handler, "reply", lambda own, *a: (free.append(running.slots._value), reply(own, *a)))
    assert ask(running)["ok"]
    assert free == [server.AT_ONCE]


def test_a_page_costs_nothing_however_often_it_is_asked_for(running, monkeypatch):
    """Any page may name it as a picture; it was made once."""
    monkeypatch.setattr(server, "page", pytest.fail)
    assert exchange(running, "GET", "/?" + "a" * 1000)[0].status == 200
