"""Functions that have one answer: wording, names, types, attributes, shapes."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from gluon_amp import _machine, aliases, checks, errors
from gluon_amp._mxnet.blocks import block_tree
from gluon_amp._mxnet.invoke import invoke, parameters_of
from gluon_amp.cli.files import data_shape
from gluon_amp.compat.opt_level import LEVELS, as_bool, cast_network, describe, resolve
from gluon_amp.convert.options import disabled_passes
from gluon_amp.dtypes import cpu_isa, cpu_support, cuda_support, normalize
from gluon_amp.files import replacing
from gluon_amp.passes import checked
from gluon_amp.rules import Policy


def test_cuda():
    assert _machine.compute_capability(10_000) is None
    assert _machine.fusion_problem((12, 2), (11, 8)) is None
    assert _machine.fusion_problem((11, 4), (11, 8)) == (
        "the driver knows CUDA 11.4, and the run-time compiler (NVRTC) is of CUDA 11.8: the driver refuses what it "
        "compiles")


def test_machines():
    assert _machine.cpu_name("model name : Some CPU @ 3 GHz") == "Some CPU @ 3 GHz"
    assert cpu_isa("flags : fpu avx avx2", environ={}) == "AVX2"
    assert [cpu_support(isa).dtype for isa in ("AVX512_CORE_BF16", "AVX512_CORE")] == ["bfloat16", "float32"]
    assert [cuda_support(capability).dtype for capability in ((7, 5), (9, 0))] == ["float16", "float32"]


def test_types():
    assert [normalize(np.float16), normalize("BF16"), normalize("fp32", or_float32=True)] == [
        "float16", "bfloat16", "float32"]


def test_mxnet():
    net = nn.HybridSequential()
    net.add(nn.Dense(2))
    assert [path for path, _ in block_tree(net)] == ["", "0"]
    assert invoke("_plus_scalar", [mx.nd.zeros(1)], {"scalar": "2.0"})[0].asscalar() == 2.0
    assert parameters_of("Activation")["act_type"] == "{'relu', 'sigmoid', 'softrelu', 'softsign', 'tanh'}, required"


def test_words():
    assert aliases.answer("disable_casts", ()) == (
        "module 'gluon_amp' has no attribute 'disable_casts': write with amp.autocast(enabled=False):")
    assert errors.expected("a number above 0", "scale", -1) == (
        "expected a number above 0, received scale=-1 (of type int)")
    assert errors.closest("Convolutoin", ["Convolution", "Pooling"]) == " Did you mean 'Convolution'?"


def test_arguments():
    assert [checks.is_number(2), checks.is_number(True), checks.is_number("2")] == [True, False, False]
    assert data_shape("data:1,3,8,8") == ("data", (1, 3, 8, 8))
    assert checked(["align_channels"]) == {"align_channels"}
    assert disabled_passes(["fuse"], True, ["shape_operands"]) == {
        "align_channels", "drop_training", "fold_batch_norm", "fold_padding", "shape_operands"}


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
    with pytest.raises(FileNotFoundError) as caught, replacing(path):
        pass
    assert caught.value.filename == str(path)
    assert caught.value.strerror == "its folder does not exist"


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


def test_levels():
    assert describe(LEVELS["O0"][1]).splitlines()[0] == "  cast_model_type      float32"
    assert resolve("O1", {"loss_scale": "128.0"})[1].loss_scale == 128.0
    assert as_bool("enabled", "False") is False
    policy = Policy("bfloat16")
    assert [each.decide("softmax", {}).rule for each in (policy, cast_network(policy))] == ["FP32", "WIDEST"]


@pytest.mark.parametrize(("asked", "hint"), [
    ("*conv99*", " Did you mean 'net_stage1_conv0_fwd'?"), ("dens*", " Did you mean 'net_dense0'?"),
    ("stage9", " Did you mean 'net_stage1_conv0_fwd'?"), ("net_dense1", " Did you mean 'net_dense0'?"), ("zzz", "")])
def test_names_and_patterns_that_match_nothing_are_answered_with_the_closest(asked, hint):
    assert errors.closest(asked, ["net_stage1_conv0_fwd", "net_dense0"]) == hint
