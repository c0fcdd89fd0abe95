"""Training in 2 and 4 processes on this machine, through the KVStore and Horovod, against training in one process."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import distributed_worker as script
import mxnet as mx
import numpy as np
import pytest

import gluon_amp as amp

WORKER = Path(script.__file__)
START = WORKER.with_name("start_processes.py")
ALONE = script.Worker("none")
NEEDS_HOROVOD = pytest.mark.skipif(importlib.util.find_spec("horovod") is None,
                                   reason="Horovod is not installed: make horovod")
HOROVOD_4 = pytest.param(("horovod", 4), id="horovod-4", marks=[NEEDS_HOROVOD, pytest.mark.slow])
JOBS = [pytest.param(("kvstore", 2), id="kvstore-2"), pytest.param(("kvstore", 4), id="kvstore-4"),
        pytest.param(("horovod", 2), id="horovod-2", marks=NEEDS_HOROVOD), HOROVOD_4]
TWO = [pytest.param("kvstore", id="kvstore"), pytest.param("horovod", id="horovod", marks=NEEDS_HOROVOD)]


def start(engine, size, *arguments):
    """Run the worker script in several processes; return how they ended."""
    environ = {**os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}  # a busy machine must not fail the test
    return subprocess.run([sys.executable, START, engine, str(size), WORKER, engine, *map(str, arguments)],
                          env=environ, capture_output=True, text=True, timeout=600, check=False)


class Results:
    """What the scenarios of a job left."""

    def __init__(self, directory, size):
        self.directory, self.size = directory, size

    def of(self, scenario, rank=0):
        with np.load(self.directory / f"{scenario}.{rank}.npz") as arrays:
            return dict(arrays)

    def all_equal(self, scenario, but=()):
        """One process's arrays, after a check that the others have the same bits."""
        first = self.of(scenario)
        for rank in range(1, self.size):
            other = self.of(scenario, rank)
            different = [name for name in first if first[name].tobytes() != other[name].tobytes()]
            assert sorted(different) == sorted(but)
        return first


@pytest.fixture(scope="session")
def finished_jobs():
    return {}


@pytest.fixture(params=JOBS)
def job(request, finished_jobs, tmp_path_factory):
    """All scenarios, run once for each engine and number of processes."""
    engine, size = request.param
    if request.param not in finished_jobs:
        directory = tmp_path_factory.mktemp(f"{engine}{size}")
        done = start(engine, size, "scenarios", directory)
        assert done.returncode == 0, done.stdout + done.stderr
        finished_jobs[request.param] = Results(directory, size)
    return finished_jobs[request.param]


def close(found, reference, relative=1e-5, but=()):
    for name in set(reference) - set(but):
        np.testing.assert_allclose(found[name], reference[name], rtol=relative, atol=relative / 10, err_msg=name)


def alone(scenario, *arguments):
    """The scenario in this process, on the joint batch."""
    amp.init("float16")
    return scenario(ALONE, *arguments)


@pytest.mark.parametrize("name", ["plain", "other_store", "either_store"])
def test_training_equals_one_process_on_the_joint_batch(job, name):
    close(job.all_equal(name), alone(script.plain))


def test_first_steps_give_every_process_the_weights_and_the_gradients(job):
    close(job.all_equal("beginnings"), alone(script.beginnings))


@pytest.mark.bf16
def test_bfloat16_training_stays_equal_in_all_processes_and_close_to_one_process(job):
    found = job.all_equal("low_precision")
    amp.init("bfloat16")
    reference = script.low_precision(ALONE)
    for name, value in reference.items():
        assert np.abs(found[name] - value).max() <= 2e-2 * np.abs(value).max()


def test_an_overflow_in_one_process_skips_the_step_in_all(job):
    found = job.all_equal("overflow")
    assert found["skipped"][:, 0].tolist() == [False, False, True, False, False, False]
    assert found["kept"][:, 0].tolist() == [False, False, True, False, False, False]
    assert found["scales"][:, 0].tolist() == [256, 256, 128, 128, 128, 256]
    assert not found["skipped"][:, 1].any()
    assert not found["kept"][:, 1].any()
    assert found["scales"][:, 1].tolist() == [256, 256, 512, 512, 512, 1024]
    close(found, alone(script.overflow))


@pytest.mark.parametrize("name", ["embedding", "embedding_overflow"])
def test_row_sparse_gradients_of_other_rows_in_each_process(job, name):
    found = job.all_equal(name)
    assert found["num_skipped"] == (name == "embedding_overflow")
    close(found, alone(getattr(script, name)))


def test_what_one_process_alone_used_is_updated_in_all(job):
    found = job.all_equal("stale")
    amp.init("float16")
    close(found, script.stale(script.Worker("none", size=job.size), range(job.size)))


def test_float16_gradients_can_be_divided_before_and_added_in_fp32(job):
    found = job.all_equal("float16_gradients")
    size, mean = job.size, 1 if "kvstore" in job.directory.name else job.size
    assert found["overflow_skipped"]  # 2 * 20000 * size is beyond float16
    assert not found["predivided_skipped"]
    np.testing.assert_array_equal(found["predivided_gradient"], np.float16([2 * 20000 * size / 8, size / 4, -size / 4]))
    np.testing.assert_array_equal(found["predivided_value"], np.array([-20000, -1, 1]) * size / mean)
    norm = np.sqrt(20000 ** 2 + 2) * size
    assert found["predivided_norm"] == pytest.approx(norm, rel=1e-3)
    np.testing.assert_array_equal(found["lifted_gradient"], np.float16([2 * (2048 + size - 1), 2 * size, -2 * size]))
    assert found["lifted_num_bytes"] == 12
    assert found["overflow_num_bytes"] == found["predivided_num_bytes"] == 6
    np.testing.assert_array_equal(found["float32_value"], np.array([-2048 - size + 1, -size, size]) / mean)


def test_several_contexts_in_every_process(job):
    found = job.all_equal("contexts")
    reference = alone(script.contexts)
    close(found, reference)
    for name in reference:
        np.testing.assert_array_equal(found[name], found[name.split("@")[0] + "@0"])


def test_accumulation_clipping_and_unscaling(job):
    found = job.all_equal("accumulated")
    assert found["num_skipped"] == 1
    assert np.isnan(found["norms"][1])
    close(found, alone(script.accumulated))


def test_an_overflow_of_one_loss_in_one_process_lowers_that_losss_scale_in_all(job):
    found = job.all_equal("losses")
    first, later = 2.0 ** 16, 2.0 ** 15
    assert found["scales"].tolist() == [[first, first], [first, later], [first, later], [first, later]]
    reference = script.losses(ALONE)
    for name in set(reference) - {"scales"}:
        assert np.abs(found[name] - reference[name]).max() <= 1e-2 * np.abs(reference[name]).max()


def test_operators_may_reduce_within_forward_and_backward(job):
    close(job.all_equal("operator"), alone(script.operator))


def test_sums_over_the_processes(job):
    found = job.all_equal("sums", but=["kept", "world"])
    total = sum(range(1, job.size + 1))
    assert found["sum"].tolist() == [[total, -total]]
    assert found["mean"].tolist() == [[total / job.size, -total / job.size]]
    assert found["named"].ravel().tolist() == [0, total, 2 * total, 3 * total]
    assert found["bfloat16"].tolist() == [256 * total]
    assert found["bfloat16"].dtype == found["mean"].dtype == np.float32
    assert found["engine"] == job.directory.name[:7]
    for rank in range(job.size):
        mine = job.of("sums", rank)
        assert mine["world"].tolist() == [rank, job.size]
        assert mine["kept"].tolist() == [[rank + 1, -rank - 1]]


def test_misuse_raises_the_same_error_in_all_processes(job):
    found = job.all_equal("misuse", but=["scales"])
    assert "scaled their losses differently (by 2 in process 0)" in str(found["scales"])
    assert "trainer.allreduce_grads() before trainer.update()" in str(found["not_reduced"])
    assert "call trainer.update(), not trainer.step()" in str(found["twice"])
    assert "reduce once, after the last micro-batch" in str(found["mixed"])


@pytest.mark.parametrize("engine", TWO)
def test_training_resumes_after_a_process_was_killed_as_if_nothing_had_happened(engine, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    done = start(engine, 2, "train", killed, "--kill-at", 3)
    assert done.returncode != 0
    assert not (killed / "train.0.npz").exists()
    done = start(engine, 2, "train", killed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after step 2" in done.stdout
    amp.init("float16")
    script.train(ALONE, straight, kill_at=-1)
    found, other = Results(killed, 2).of("train", 0), Results(killed, 2).of("train", 1)
    assert all(found[name].tobytes() == other[name].tobytes() for name in found)
    reference = Results(straight, 1).of("train")
    assert found["scale"] == reference["scale"]
    close(found, reference, relative=1e-2)


class TestRefusals:
    """What cannot work is said at ``init_trainer``, in a process that was started alone."""

    def trainer(self, store):
        net = mx.gluon.nn.Dense(1, in_units=2)
        net.initialize()
        return mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store)

    def test_processes_that_were_not_started_together(self):
        amp.init("float16")
        with pytest.raises(amp.StateError, match=r"DMLC_ROLE='worker', received None\)\. docs/distributed\.md shows"):
            amp.init_trainer(self.trainer("dist_sync"))

    @pytest.mark.parametrize(("store", "hint"), [("horovod", "horovod.mxnet.DistributedTrainer"),
                                                 ("dits_sync", "Did you mean 'dist_sync'")])
    def test_stores_that_mxnet_silently_takes_for_none(self, store, hint):
        amp.init("float16")
        with pytest.raises(ValueError, match=hint):
            amp.init_trainer(self.trainer(store))

    @pytest.mark.parametrize("factor", [0, -1.0, float("inf"), "2", True])
    def test_factors(self, factor):
        amp.init("float16")
        with pytest.raises(ValueError, match=r"expected a finite number above 0, received gradient_predivide_factor"):
            amp.init_trainer(self.trainer("device"), gradient_predivide_factor=factor)

    @pytest.mark.parametrize("value", [1.0, mx.nd.zeros((2, 2)).tostype("row_sparse"), mx.nd.zeros(2, dtype="int32")])
    def test_what_allreduce_cannot_add(self, value):
        with pytest.raises(TypeError, match="expected a dense NDArray of float32, float16, bfloat16"):
            amp.parallel.allreduce(value)


@mx.kvstore.KVStoreBase.register
class DoublingStore(mx.kvstore.KVStoreBase):
    """A registered store that pretends to be one of two equal workers."""

    type, rank, num_workers = "doubling", 0, 2

    def is_capable(self, capability):
        return False

    def broadcast(self, key, value, out, priority=0):
        for array in out:
            value.copyto(array)

    def pushpull(self, key, value, out=None, priority=0):
        for array in value:
            array *= 2


def test_registered_stores_reduce_everything_through_pushpull():
    amp.init("float16")
    net = script.dense_net()
    amp.exclude(net)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=DoublingStore())
    amp.init_trainer(trainer, 4.0, gradient_predivide_factor=2.0)
    script.backward(ALONE, net, trainer, script.joint_batches(1)[0])
    trainer.step(2 * script.BATCH)
    reference = script.dense_net()
    amp.exclude(reference)
    plain = mx.gluon.Trainer(reference.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)
    amp.init_trainer(plain, 4.0)
    script.backward(ALONE, reference, plain, script.joint_batches(1)[0])
    plain.step(script.BATCH)
    close(script.weights(net), script.weights(reference))
    assert trainer._amp_loss_scaler.reduction.group.size == 2
