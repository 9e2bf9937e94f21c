"""Output that is gone, terminals that are closed, signals: how a command ends."""

import errno
import fcntl
import io
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, interpreted, is_one_line, only_run, result_of

import gb_dqn_minigrid
from gbcore.run import StopSignal, fail, load_checkpoint, one_line_errors, warn

WORDS = [  # a run that never learns, which it says on stderr
    sys.executable, gb_dqn_minigrid.__file__, "--env-id", "Empty-5x5", "--eval-frequency", "0",
    "--eval-episodes", "1", "--log-frequency", "10", "--eval-epsilon", "1", "--learning-starts",
    "9999", "--total-timesteps",
]  # fmt: skip


@interpreted
@pytest.mark.parametrize(
    "line",
    [
        "({} 2> /dev/full; echo $? > {}) | head -1",
        "{} >&- 2>&- <&-; echo $? > {}",
        "{} > /dev/full 2>&1; echo $? > {}",
    ],
    ids=["head", "none from the start", "a full disk"],
)
def test_a_run_outlives_its_output(line, tmp_path):
    line = line.format(
        shlex.join([*WORDS, "300", "--run-dir", str(tmp_path / "runs")]), tmp_path / "status"
    )
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (tmp_path / "status").read_text() == "0\n", done
    assert "Error" not in done.stderr
    run = only_run(tmp_path / "runs")
    assert result_of(run)["steps"] == 300
    assert load_checkpoint(run)["logger"]["step"] == 300


@interpreted
def test_a_terminal_that_is_closed_ends_a_run_with_a_checkpoint(tmp_path):
    """What it prints then is an error on the terminal, and dropped."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*WORDS, "300000", "--run-dir", str(tmp_path)], stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    seen = b""
    while b"results go to" not in seen:
        seen += os.read(master, 1000)
    time.sleep(0.5)
    os.close(master)  # sends SIGHUP
    assert process.wait(timeout=300) == 130
    result = result_of(only_run(tmp_path))
    assert result["interrupted"]
    assert load_checkpoint(only_run(tmp_path))["logger"]["step"] == result["steps"]


def test_every_command_outlives_its_output_and_ends_in_one_line():
    for folder in ("tools", "reproduce", "examples"):
        for path in (ROOT / folder).glob("*.py"):
            text = path.read_text()
            if "tyro.cli(Args" in text:
                assert "\n@one_line_errors\ndef main():\n" in text, path


def test_what_cannot_be_printed_is_dropped(monkeypatch):
    class Gone(io.StringIO):
        def write(self, *_):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        flush = write

    @one_line_errors
    def main():
        print("nobody reads this", flush=True)
        warn("nor this")
        fail("nor this", 3)

    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", Gone())
    with pytest.raises(SystemExit, match="3"):
        main()


@pytest.mark.parametrize("allocate", [np.empty, torch.empty])
def test_too_little_memory_is_one_line(allocate, capsys):
    @one_line_errors
    def main():
        allocate(10**17, dtype={np.empty: np.uint8, torch.empty: torch.uint8}[allocate])

    with pytest.raises(SystemExit, match="1"):
        main()
    assert is_one_line(capsys, "allocate", "--buffer-size")


def test_signals_end_a_run_and_nohup_is_kept():
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        with StopSignal() as stop:
            signal.raise_signal(number)
            assert stop.asked
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.asked
    signal.signal(signal.SIGHUP, before)


def test_a_tilde_is_the_user_s_folder_in_every_word_of_every_command(monkeypatch):
    typed = [
        "tool",
        "~/my runs",
        "~",
        "--out=~/a.png",
        "--out=~",
        "a~/b",
        "--out=a~/b",
        "~x",
        "--~/",
    ]
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "argv", typed.copy())
    one_line_errors(lambda: None)()
    meant = ["/home/me/my runs", "/home/me", "--out=/home/me/a.png", "--out=/home/me", *typed[5:]]
    assert sys.argv == ["tool", *meant]
