"""Tests which signals request a stop, how often each is caught, and what they do."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from rwkv.io.signals import STOPPING, Signalled, StopRequest, consume_interruptibly, raise_on_signal

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="Windows has two of these signals"),
              pytest.mark.usefixtures("handlers")]


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOPPING)
def test_a_request_to_stop_is_recorded_and_the_next_ctrl_c_ends_at_once(number: int) -> None:
    received: list[int] = []
    with StopRequest(on_signal=received.append) as stop:
        assert not stop.requested
        send(number)
        assert stop.requested
        for later in STOPPING:
            if later != signal.SIGINT:
                send(later)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert received == [number]


def test_every_signal_is_passed_on_if_requested() -> None:
    received: list[int] = []
    with StopRequest(on_signal=received.append, every_signal=True):
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
            send(number)
    assert received == [signal.SIGINT, signal.SIGHUP, signal.SIGINT]


def test_an_ignored_signal_stays_ignored_but_for_ctrl_c() -> None:
    """nohup ignores SIGHUP. A shell without job control starts background programs with SIGINT ignored."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    with raise_on_signal(), StopRequest() as stop:
        for number in STOPPING:
            if number != signal.SIGINT:
                send(number)
        assert not stop.requested
        send(signal.SIGINT)
        assert stop.requested
    with raise_on_signal(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert {signal.getsignal(number) for number in STOPPING} == {signal.SIG_IGN}


@pytest.mark.parametrize("number", [number for number in STOPPING if number != signal.SIGINT])
def test_outside_of_a_request_a_signal_interrupts_and_its_repetition_does_not(number: int) -> None:
    before = signal.getsignal(number)
    with raise_on_signal():
        with pytest.raises(Signalled) as signalled:
            send(number)
        for later in STOPPING:           # these arrive while the program cleans up
            if later != signal.SIGINT:
                send(later)
    assert signalled.value.name == signal.Signals(number).name
    assert signal.getsignal(number) == before


@pytest.mark.programs
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_program_that_is_starting_ends_with_one_sentence(number: int) -> None:
    code = ("import os, sys; from rwkv import cli\n"
            "with cli.exit_on_user_error():\n"
            f"    try: os.kill(os.getpid(), {int(number)})\n"
            "    finally: print('cleaned up')")
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (130, "cleaned up\n")
    assert process.stderr == f"interrupted by {number.name}\n"


@pytest.mark.programs
@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("raise UserError('x')", 2), ("raise KeyboardInterrupt", 130)])
def test_a_signal_after_a_program_s_end_does_not_change_its_status(end: str, status: int) -> None:
    """Signals may still arrive while Python shuts down, because W&B and other libraries work then."""
    code = ("import atexit, os; from rwkv import cli; from rwkv.errors import UserError\n"
            f"atexit.register(lambda: [os.kill(os.getpid(), number) for number in {[int(n) for n in STOPPING[1:]]}])\n"
            f"with cli.exit_on_user_error(): {end}")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == status


def test_waiting_for_a_library_that_ignores_signals_is_ended() -> None:
    """The library reads items without end. In the second case it never returns from reading the first item."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for sleeps in (False, True):
        computing, awake = threading.Event(), threading.Event()

        def work(items: Iterator[int], sleeps: bool = sleeps, computing: threading.Event = computing,
                 awake: threading.Event = awake) -> None:
            for _ in items:
                computing.set()
                if sleeps:
                    awake.wait(20)

        def interrupt(computing: threading.Event = computing) -> None:
            computing.wait()
            send(signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            consume_interruptibly(itertools.count(), work)
        awake.set()


def test_an_interruption_while_the_thread_starts_leaves_no_thread_behind() -> None:
    """A thread that is left behind would compute until the process ends, and hold up all others."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before, ended = {*threading.enumerate()}, threading.Event()

    def interrupting_items() -> Iterator[int]:
        send(signal.SIGINT)
        while not ended.is_set():
            yield 0

    for _ in range(10):
        with pytest.raises(KeyboardInterrupt):
            consume_interruptibly(interrupting_items(), lambda items: deque(items, maxlen=0))
    try:
        for thread in {*threading.enumerate()} - before:
            thread.join(5)
            assert not thread.is_alive()
    finally:
        ended.set()


def test_the_error_of_the_work_is_raised() -> None:
    read: list[int] = []
    consume_interruptibly(range(3), read.extend)
    assert read == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        consume_interruptibly((1 // number for number in range(2)), list)
