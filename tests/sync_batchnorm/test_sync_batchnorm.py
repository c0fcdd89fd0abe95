"""convert_sync_batchnorm: two contexts compute what one does on the joint batch; what cannot be is refused."""
from __future__ import annotations

import mxnet as mx
import pytest
from mxnet.gluon import nn
from native_cases import script
from networks import sequential

import gluon_amp as amp
from gluon_amp.errors import StateError

PROGRAM = """
import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn
random = np.random.RandomState(0)
data, weights = random.normal(1, 3, size=(6, 4, 5, 5)), random.normal(size=(6, 4, 5, 5))

def run(contexts, convert, hybridize):
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.BatchNorm(in_channels=4), nn.Activation("tanh"), nn.BatchNorm(in_channels=4))
    net.initialize(mx.init.One(), ctx=contexts)
    if convert:
        assert amp.convert_sync_batchnorm(net) is net
    if hybridize:
        net.hybridize()
    share = len(data) // len(contexts)
    parts = [mx.nd.array(data[i * share:(i + 1) * share], ctx=c) for i, c in enumerate(contexts)]
    scales = [mx.nd.array(weights[i * share:(i + 1) * share], ctx=c) for i, c in enumerate(contexts)]
    for part in parts:
        part.attach_grad()
    with autograd.record():
        outs = [net(part) for part in parts]
        losses = [(out * scale).sum() for out, scale in zip(outs, scales)]
    autograd.backward(losses)
    gather = lambda arrays: np.concatenate([array.asnumpy() for array in arrays])
    means = [net[0].running_mean.data(context).asnumpy() for context in contexts]
    gammas = sum(net[0].gamma.grad(context).asnumpy() for context in contexts)
    return gather(outs), gather(part.grad for part in parts), means, gammas

expected = run([mx.cpu(0)], False, False)
alone = run([mx.cpu(0), mx.cpu(1)], False, False)
assert np.abs(alone[0] - expected[0]).max() > 0.01  # each context by itself gives something else
for hybridize in (False, True):
    found = run([mx.cpu(0), mx.cpu(1)], True, hybridize)
    for one, other in zip(expected[:2], found[:2]):
        np.testing.assert_allclose(other, one, rtol=2e-3, atol=2e-4)
    for mean in found[2]:
        np.testing.assert_allclose(mean, expected[2][0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[3], expected[3], rtol=2e-3, atol=1e-3)
print("equal")
"""


SKIPPED = """
import gluon_amp as amp
import mxnet as mx
import numpy as np
from mxnet.gluon import nn
amp.init()
contexts = [mx.cpu(0), mx.cpu(1)]
for hybridize in (False, True):
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=4), nn.BatchNorm(in_channels=4), nn.Dense(2, in_units=4))
    net.initialize(mx.init.Normal(0.3), ctx=contexts)
    amp.convert_sync_batchnorm(net)
    net.hybridize(hybridize)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, update_on_kvstore=False)
    amp.init_trainer(trainer, loss_scaler=1.0)
    kept = []
    for factors in ((1, 2), (1, np.inf)):
        with mx.autograd.record():
            outs = [net(mx.nd.random.normal(shape=(8, 4), ctx=c) * f) for c, f in zip(contexts, factors)]
            with amp.scale_loss([out.mean() for out in outs], trainer) as losses:
                mx.autograd.backward(losses)
        trainer.step(1)
        kept.append([p.data(c).asnumpy() for p in net.collect_params().values() for c in contexts])
    assert amp.get_loss_scaler(trainer).num_skipped == 1
    assert np.abs(kept[0][4]).max() > 0
    for one, other in zip(*kept):
        np.testing.assert_array_equal(one, other)
print("equal")
"""


@pytest.mark.parametrize("program", [PROGRAM, SKIPPED], ids=["joint_batch", "skipped_step"])
def test_two_contexts(program):
    """They equal one on the joint batch, and their statistics are as before a step that is skipped."""
    assert script(program, MXNET_CPU_TEMP_COPY="2048", OMP_NUM_THREADS="1").endswith("equal")


def test_one_context_has_nothing_to_synchronize():
    net = sequential([nn.BatchNorm(in_channels=2)], active=False)
    with pytest.warns(UserWarning, match="nothing to synchronize"):
        assert amp.convert_sync_batchnorm(net) is net


def test_parameters_in_low_precision_are_refused():
    net = nn.BatchNorm(in_channels=2)
    net.initialize()
    net.gamma.cast("float16")
    with pytest.raises(StateError, match="gamma"):
        amp.convert_sync_batchnorm(net, num_devices=2)


def test_a_number_that_contradicts_the_contexts_is_refused(monkeypatch):
    monkeypatch.setenv("MXNET_CPU_TEMP_COPY", "2048")
    net = nn.BatchNorm(in_channels=2)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(ValueError, match="3"):
        amp.convert_sync_batchnorm(net, num_devices=3)


@pytest.mark.parametrize("arguments", [{"net": 3}, {"net": nn.BatchNorm(), "allreduce": 3}])
def test_other_things_are_refused(arguments):
    with pytest.raises(TypeError, match="expected"):
        amp.convert_sync_batchnorm(**arguments)
