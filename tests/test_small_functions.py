"""Functions that have one answer: wording, names, types, attributes, shapes."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from gluon_amp import errors
from gluon_amp.base.files import replacing


def test_files(tmp_path):
    path = tmp_path / "note.txt"
    with replacing(path) as (temporary,), open(temporary, "w") as file:
        file.write("kept")
    with pytest.raises(ZeroDivisionError), replacing(path) as (temporary,):
        raise ZeroDivisionError
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_cannot_be_written_are_named(tmp_path):
    path = tmp_path / "absent" / "note.txt"
    with pytest.raises(FileNotFoundError, match=rf"its folder does not exist: '{path}'"), replacing(path):
        pass


def test_a_pipe_is_written_to_and_stays(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    received = []
    reader = threading.Thread(target=lambda: received.append(path.read_text()), daemon=True)
    reader.start()
    with replacing(path) as (temporary,), open(temporary, "w") as file:
        file.write("whole")
    reader.join(60)
    assert received == ["whole"]
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


def test_standard_output_can_be_named():
    code = "from gluon_amp import Policy; Policy('float16').save('/dev/stdout')"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target_dtype"] == "float16"


def test_files_keep_their_permissions(tmp_path):
    path, written = tmp_path / "note.txt", tmp_path / "written.txt"
    for mode in (None, 0o600, 0o664):
        for file in (path, written):
            if mode is not None:
                file.chmod(mode)
        written.write_text("kept")
        with replacing(path) as (temporary,), open(temporary, "w") as file:
            file.write("kept")
        assert path.stat().st_mode == written.stat().st_mode


@pytest.mark.parametrize(("asked", "hint"), [
    ("*conv99*", " Did you mean 'net_stage1_conv0_fwd'?"), ("dens*", " Did you mean 'net_dense0'?"),
    ("stage9", " Did you mean 'net_stage1_conv0_fwd'?"), ("net_dense1", " Did you mean 'net_dense0'?"), ("zzz", "")])
def test_names_and_patterns_that_match_nothing_are_answered_with_the_closest(asked, hint):
    assert errors.closest(asked, ["net_stage1_conv0_fwd", "net_dense0"]) == hint
