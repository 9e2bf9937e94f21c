"""Output that is gone, terminals that are closed, signals: how a command ends."""

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
from conftest import ROOT, SHORT, interpreted, is_one_line, only_run, result_of

import gb_dqn_minigrid
from gbcore.run import StopSignal, fail, load_checkpoint, one_line_errors, warn

# A run that never learns, which it says on stderr.
WORDS = [sys.executable, gb_dqn_minigrid.__file__, *SHORT, "--env-id", "Empty-5x5"]
WORDS += ["--learning-starts", "9999", "--total-timesteps"]


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
    words = shlex.join([*WORDS, "300", "--run-dir", str(tmp_path / "runs")])
    line = line.format(words, tmp_path / "status")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (tmp_path / "status").read_text() == "0\n", done
    assert "Error" not in done.stderr
    run = only_run(tmp_path / "runs")
    assert result_of(run)["steps"] == load_checkpoint(run)["logger"]["step"] == 300


def test_what_cannot_be_printed_is_dropped(monkeypatch):
    @one_line_errors
    def main():
        print("nobody reads this", flush=True)
        warn("nor this")
        fail("nor this", 3)

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream := io.StringIO())
        stream.close()
    with pytest.raises(SystemExit, match="3"):
        main()


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


@pytest.mark.parametrize(
    "allocate", [lambda: np.empty(10**17, np.uint8), lambda: torch.empty(10**17, dtype=torch.uint8)]
)
def test_too_little_memory_is_one_line(allocate, capsys):
    with pytest.raises(SystemExit, match="1"):
        one_line_errors(allocate)()
    assert is_one_line(capsys, "allocate", "--buffer-size")


def test_nohup_is_kept():
    """That signals end a run is in test_resume.py."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.asked
    signal.signal(signal.SIGHUP, before)
