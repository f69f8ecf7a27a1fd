"""Stacks of real processes that make no progress: asleep, busy, stopped, in C code with the interpreter's lock."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from waiting import wait_until

from vlatune.train.failures import dump_and_kill, process_state

PROGRAM = """
import ctypes, sys, threading, time
from vlatune.train.failures import dump_stacks_on_signal

is_running = threading.Event()

def main_function():
    print("ready", flush=True)
    {body}

def other_thread():
    is_running.set()
    threading.Event().wait()

file = open(dump_stacks_on_signal(), "w")
threading.Thread(target=other_thread, daemon=True).start()
is_running.wait()
main_function()
"""
WAIT_S = 60.0
BODIES = {
    "sleeping": "time.sleep(1000)",
    "busy": "while True: pass",
    "holding the lock in C": "while True: ctypes.PyDLL(None).sleep(1000)",
}


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def program(body: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program and wait until it has reached `body`."""
    with started(sys.executable, "-c", PROGRAM.format(body=body)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.mark.parametrize("how", BODIES)
def test_the_stacks_of_all_threads_are_returned_and_the_process_is_killed(how):
    with program(BODIES[how]) as process:
        text = dump_and_kill(process.pid, wait_s=WAIT_S)
        assert process.wait(WAIT_S) == -signal.SIGKILL
    assert text.startswith("running\n")
    assert "main_function" in text
    assert "other_thread" in text


def test_the_stacks_of_a_stopped_process_are_returned():
    with program(BODIES["busy"]) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(process.pid) == "stopped by a signal", WAIT_S)
        text = dump_and_kill(process.pid, wait_s=WAIT_S)
        assert process.wait(WAIT_S) == -signal.SIGKILL
    assert text.startswith("stopped by a signal\n")
    assert "main_function" in text


def test_stacks_that_are_written_in_pieces_are_complete():
    slow = "file.write('one\\n'), file.flush(), time.sleep(0.1), file.write('two\\n'), file.flush()"
    body = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: ({slow}))\n    print('set', flush=True)"
    body += "\n    while True: time.sleep(0.01)"  # Python's handler waits for the main thread, whichever thread got the signal
    with program(body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "set\n"
        assert dump_and_kill(process.pid, wait_s=WAIT_S) == "running\none\ntwo\n"
        assert process.wait(WAIT_S) == -signal.SIGKILL


def test_a_process_without_a_handler_is_killed():
    with started("sleep", "1000") as process:
        assert dump_and_kill(process.pid, wait_s=0.1).endswith("did not write its stacks")
        assert process.wait(WAIT_S) < 0


def test_a_process_that_has_ended_is_reported_as_gone():
    with started("true") as process:
        process.wait(WAIT_S)
        assert dump_and_kill(process.pid) == "gone"
