"""What scripts do with symbols and modules trains as without AMP: equal in FP32, alike in low precision."""
from __future__ import annotations

import random

import mxnet as mx
import numpy as np
import pytest
from networks import relative

import gluon_amp as amp

pytestmark = pytest.mark.machine
TWO = [mx.cpu(0), mx.cpu(1)]


def values(*shape, seed=0):
    return np.random.RandomState(seed).normal(size=shape).astype("float32")


def labels(count, classes=10, seed=1):
    return np.random.RandomState(seed).randint(0, classes, count)


def images(count=24, seed=0):
    return mx.io.NDArrayIter(values(count, 16, 8, 8, seed=seed), labels(count), 8, label_name="softmax_label")


def vectors(count=24):
    return mx.io.NDArrayIter(values(count, 20), labels(count), 8, label_name="softmax_label")


def convolutional():
    x = mx.sym.Convolution(mx.sym.var("data"), num_filter=32, kernel=(3, 3), no_bias=True, name="first")
    x = mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False, name="norm"), act_type="relu")
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10, name="fc"), name="softmax")


def dense(group=("", "")):
    with mx.AttrScope(**({"ctx_group": group[0]} if group[0] else {})):
        x = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=32, name="first")
        x = mx.sym.Activation(x, act_type="relu")
    with mx.AttrScope(**({"ctx_group": group[1]} if group[1] else {})):
        return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10, name="fc"), name="softmax")


def arrays(*dicts):
    """Return values by name, but for moving statistics: those of Module.fit differ from run to run without AMP, too."""
    return {name: array.asnumpy() for each in dicts for name, array in each.items() if "moving" not in name}


def fit(module, iterator, **settings):
    module.fit(iterator, num_epoch=2, initializer=mx.init.Xavier(), optimizer_params={"learning_rate": 0.1}, **settings)
    return arrays(*module.get_params())


def several_devices():
    return fit(mx.mod.Module(convolutional(), context=TWO, work_load_list=[1, 3]), images(), kvstore="local")


def frozen_weights():
    return fit(mx.mod.Module(convolutional(), fixed_param_names=["first_weight"]), images())


def model_parallel():
    groups = {"one": mx.cpu(1), "other": mx.cpu(2)}
    return fit(mx.mod.Module(dense(("one", "other")), group2ctxs=groups), vectors())


def buckets():
    def generate(length):
        table = mx.sym.Embedding(mx.sym.var("data"), input_dim=30, output_dim=16, name="table")
        stack = mx.rnn.SequentialRNNCell()
        stack.add(mx.rnn.LSTMCell(32, prefix="lstm_"))
        stack.add(mx.rnn.GRUCell(32, prefix="gru_"))
        outputs, _ = stack.unroll(length, table, merge_outputs=True)
        scores = mx.sym.FullyConnected(mx.sym.reshape(outputs, (-1, 32)), num_hidden=30, name="scores")
        target = mx.sym.reshape(mx.sym.var("softmax_label"), (-1,))
        return mx.sym.SoftmaxOutput(scores, target, name="softmax"), ("data",), ("softmax_label",)

    generator = np.random.RandomState(0)
    sentences = [list(generator.randint(1, 30, generator.randint(2, 12))) for _ in range(60)]
    iterator = mx.rnn.BucketSentenceIter(sentences, 8, buckets=[4, 8, 12], invalid_label=0)
    module = mx.mod.BucketingModule(generate, iterator.default_bucket_key, context=TWO)
    return fit(module, iterator, eval_metric=mx.metric.Perplexity(0))


def chain_with_a_loss_in_python():
    def gradient(scores, target):
        return (mx.nd.softmax(scores) - mx.nd.one_hot(target, 10)) / target.shape[0]

    first = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=32, name="first"), act_type="relu")
    module = mx.mod.SequentialModule()
    module.add(mx.mod.Module(first, label_names=[]))
    module.add(mx.mod.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=10, name="fc"), label_names=[]),
               auto_wiring=True)
    module.add(mx.mod.PythonLossModule(grad_func=gradient), take_labels=True, auto_wiring=True)
    return fit(module, vectors())


def feed_forward():
    model = mx.model.FeedForward(convolutional(), ctx=TWO, num_epoch=2, learning_rate=0.1, initializer=mx.init.Xavier())
    model.fit(images())
    assert model.predict(images(seed=2)).shape == (24, 10)
    return arrays(model.arg_params, model.aux_params)


def states():
    state = mx.sym.var("state", shape=(4, 32))
    summed = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=32, name="of_data")
    following = mx.sym.tanh(summed + mx.sym.FullyConnected(state, num_hidden=32, name="of_state"))
    loss = mx.sym.MakeLoss(mx.sym.mean(mx.sym.square(following)))
    module = mx.mod.Module(mx.sym.Group([mx.sym.BlockGrad(following), loss]), label_names=None, state_names=["state"])
    module.bind([("data", (4, 16))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer_params={"learning_rate": 1.0})
    outputs = None
    for step in range(4):
        if outputs is None:
            module.set_states(value=0)
        else:
            module.set_states(states=outputs[:-1])
        module.forward(mx.io.DataBatch([mx.nd.array(values(4, 16, seed=step))]))
        outputs = module.get_outputs(merge_multi_context=False)
        module.backward()
        module.update()
    return {**arrays(*module.get_params()), "state": outputs[0][0].asnumpy()}


def shared_buffers():
    symbol, buffer, shared = convolutional(), {}, ["first_weight", "norm_gamma", "norm_beta", "fc_weight", "fc_bias"]
    large = symbol.simple_bind(mx.cpu(), shared_buffer=buffer, shared_arg_names=shared, data=(4, 16, 8, 8),
                               softmax_label=(4,))
    small = symbol.simple_bind(mx.cpu(), shared_exec=large, shared_buffer=buffer, shared_arg_names=shared,
                               data=(2, 16, 8, 8), softmax_label=(2,))
    for seed, array in enumerate(large.arg_arrays):
        array[:] = 0.2 * values(*array.shape, seed=seed)
    large.aux_dict["norm_moving_var"][:] = 1
    found = {}
    for name, executor in (("large", large), ("small", small)):
        executor.forward(is_train=True, data=mx.nd.array(values(*executor.arg_dict["data"].shape)))
        executor.backward()
        found[name] = executor.outputs[0].asnumpy()
        found[f"{name}_gradient"] = executor.grad_dict["fc_weight"].asnumpy()
    return found


def joined(values_by_name):
    return np.concatenate([value.ravel() for value in values_by_name.values()])


@pytest.mark.filterwarnings("ignore:.*FeedForward has been deprecated")
@pytest.mark.parametrize("dtype", ["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize("train", [several_devices, frozen_weights, model_parallel, buckets, feed_forward, states,
                                   chain_with_a_loss_in_python, shared_buffers], ids=lambda train: train.__name__)
def test_training(train, dtype):
    def run():
        random.seed(1)
        np.random.seed(1)
        mx.random.seed(1)
        return train()
    expected = run()
    amp.init(dtype)
    found = run()
    assert found.keys() == expected.keys()
    if dtype == "float32":
        for name, value in expected.items():
            assert relative(value, found[name]) < 1e-4, name
    # Biases are small, and change when a rectifier does.
    whole, other = joined(expected), joined(found)
    assert np.linalg.norm(whole - other) < 0.01 * np.linalg.norm(whole)
