"""What forward passes write is as before where a step is skipped: against runs that never see the bad batch."""
import copy

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import gluon_amp as amp

MODES = {"eager": None, "hybridized": {}, "static_alloc": {"static_alloc": True},
         "static_shape": {"static_alloc": True, "static_shape": True}}
GOOD, BAD = 1.0, float("inf")


class _Counting(mx.operator.CustomOp):
    """Passes its data on, and sums it up in its state."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])
        if is_train:
            aux[0][:] += in_data[0].sum()

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("amp_test_counting")
class _CountingProp(mx.operator.CustomOpProp):
    def list_auxiliary_states(self):
        return ["total"]

    def infer_shape(self, in_shape):
        return in_shape, in_shape, [(1,)]

    def create_operator(self, ctx, shapes, dtypes):
        return _Counting()


class _Counted(mx.gluon.HybridBlock):
    """Runs it."""

    def __init__(self):
        super().__init__()
        self.total = self.params.get("total", shape=(1,), init="zeros", grad_req="null", differentiable=False)

    def hybrid_forward(self, F, x, total):
        x = F.slice(x, begin=(0,), end=(None,))  # custom operators read garbage in the layouts of oneDNN
        return F.slice(F.Custom(x, total, op_type="amp_test_counting"), begin=(0,), end=(None,))


def _regularised():
    data = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4), act_type="sigmoid")
    result = mx.sym.IdentityAttachKLSparseReg(data, penalty=0.01)
    return mx.gluon.SymbolBlock(mx.sym.reshape(result, (0, 0, 1, 1)), mx.sym.var("data"))


def _layers():
    return {
        "batch_norm": [nn.BatchNorm(in_channels=8)],
        "two": [nn.BatchNorm(in_channels=8), nn.Conv2D(8, 1, in_channels=8), nn.BatchNorm(in_channels=8)],
        "frozen": [nn.BatchNorm(in_channels=8, scale=False, center=False)],
        "with_relu": [nn.BatchNormReLU(in_channels=8), nn.Conv2D(8, 1, in_channels=8)],
        "custom": [_Counted()], "sparse_regulariser": [_regularised()]}


def _net(layers, mode, devices=(None,)):
    mx.random.seed(1)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, in_channels=4), *layers, nn.GlobalAvgPool2D(), nn.Dense(2))
    net.initialize(mx.init.Normal(0.3), ctx=[device or mx.cpu() for device in devices])
    with mx.autograd.pause():
        net(mx.nd.zeros((4, 4, 8, 8), ctx=devices[0]))
    mx.nd.waitall()  # MXNet's asnumpy may read a weight while oneDNN brings it into another layout
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    return net


def _trainer(net, **options):
    return mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, update_on_kvstore=False, **options)


def _attached(layers="batch_norm", mode="hybridized", devices=(None,)):
    """Return a network, and its trainer with a loss scaler, under AMP."""
    amp.init()
    net = _net(_layers()[layers], mode, devices)
    trainer = _trainer(net)
    amp.init_trainer(trainer, loss_scaler=1.0)
    return net, trainer


def _batch(number, factor, device=None):
    values = np.random.RandomState(number).normal(size=(4, 4, 8, 8)).astype("float32")
    return mx.nd.array(values, ctx=device) * factor


def _step(net, trainer, *batches):
    for batch in batches:
        with mx.autograd.record():
            loss = net(batch).square().mean()
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
    trainer.step(1)


def _values(net):
    return [parameter.data(device).asnumpy() for parameter in net.collect_params().values()
            for device in parameter.list_ctx()]


def _assert_equal(found, expected):
    assert len(found) == len(expected) > 0
    for got, want in zip(found, expected):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", _layers())
def test_a_skipped_step_leaves_no_trace(layers, mode):
    found = []
    for factors in ([GOOD, GOOD, BAD, GOOD], [GOOD, GOOD, None, GOOD]):
        net, trainer = _attached(layers, mode)
        for number, factor in enumerate(factors):
            if factor is not None:
                _step(net, trainer, _batch(number, factor))
        found.append(_values(net))
    assert all(np.isfinite(values).all() for values in found[0])
    _assert_equal(*found)


@pytest.mark.parametrize("mode", MODES)
def test_right_behind_a_skipped_step_all_is_as_before(mode, tmp_path):
    net, trainer = _attached(mode=mode)
    _step(net, trainer, _batch(0, GOOD))
    before, inferred = _values(net), net(_batch(7, GOOD)).asnumpy()
    _step(net, trainer, _batch(1, BAD))
    net.save_parameters(str(tmp_path / "saved"))
    np.testing.assert_array_equal(net(_batch(7, GOOD)).asnumpy(), inferred)
    read = mx.nd.load(str(tmp_path / "saved"))
    for name, parameter in net._collect_params_with_prefix().items():
        np.testing.assert_array_equal(read[name].asnumpy(), parameter.data().asnumpy())
    _assert_equal(_values(net), before)


@pytest.mark.parametrize("mode", MODES)
def test_all_micro_batches_of_a_skipped_step_are_forgotten(mode):
    net, trainer = _attached("two", mode)
    for parameter in net.collect_params().values():
        parameter.grad_req = "add" if parameter.grad_req == "write" else "null"
    _step(net, trainer, _batch(0, GOOD), _batch(1, GOOD))
    before = _values(net)
    _step(net, trainer, _batch(2, GOOD), _batch(3, BAD), _batch(4, GOOD))
    _assert_equal(_values(net), before)


@pytest.mark.parametrize("mode", ["eager", "hybridized"])
def test_on_several_devices_every_copy_is_as_before(mode):
    devices = [mx.cpu(0), mx.cpu(1)]
    net, trainer = _attached(mode=mode, devices=devices)
    kept = []
    for number, factors in enumerate(([GOOD, GOOD], [GOOD, BAD])):
        with mx.autograd.record():
            losses = [net(_batch(number, factor, device)).square().mean() for factor, device in zip(factors, devices)]
            with amp.scale_loss(losses, trainer) as scaled:
                mx.autograd.backward(scaled)
        trainer.step(1)
        kept.append(_values(net))
    _assert_equal(*kept)


@pytest.mark.parametrize("mode", MODES)
def test_a_grad_scaler_puts_back_what_its_first_step_wrote(mode):
    net = _net(_layers()["batch_norm"], mode)
    trainer = _trainer(net)
    scaler = amp.GradScaler()
    before = _values(net)
    with mx.autograd.record(), amp.autocast():
        loss = net(_batch(0, BAD)).square().mean()
    scaler.scale(loss).backward()
    assert not scaler.step(trainer, 1)
    scaler.update()
    _assert_equal(_values(net), before)


@pytest.mark.parametrize("mode", ["eager", "hybridized"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_network_beside_the_one_that_skips_keeps_what_it_wrote(mode, bad):
    amp.init()
    pairs = []
    for factors in ([BAD if i == bad else GOOD for i in range(2)], [GOOD, GOOD]):
        nets = [_net(_layers()["batch_norm"], mode) for _ in range(2)]
        trainers = [_trainer(net) for net in nets]
        for trainer in trainers:
            amp.init_trainer(trainer, loss_scaler=1.0)
        initial = _values(nets[bad])
        with mx.autograd.record():
            losses = [net(_batch(0, factor)).square().mean() for net, factor in zip(nets, factors)]
            with amp.scale_loss(losses[0], trainers[0]) as one, amp.scale_loss(losses[1], trainers[1]) as other:
                mx.autograd.backward([one, other])
        for trainer in trainers:
            trainer.step(1)
        pairs.append(nets)
    _assert_equal(_values(pairs[0][bad]), initial)
    _assert_equal(*(_values(nets[1 - bad]) for nets in pairs))


@pytest.mark.parametrize("mode", ["eager", "hybridized"])
def test_what_a_bad_generator_made_the_discriminator_write_is_put_back(mode):
    amp.init()
    generator, discriminator = (_net(_layers()["batch_norm"], mode) for _ in range(2))
    head = nn.HybridLambda(lambda F, x: F.broadcast_mul(F.reshape(x, (0, 2, 1, 1)), F.ones((1, 4, 8, 8)).slice_axis(
        axis=1, begin=0, end=1)).tile((1, 2, 1, 1)))
    trainers = [_trainer(net) for net in (discriminator, generator)]
    for trainer in trainers:
        amp.init_trainer(trainer, loss_scaler=1.0)

    def iteration(number, of_generator):
        with mx.autograd.record():
            fake = head(generator(_batch(number, GOOD)))
            loss = discriminator(_batch(number, GOOD)).mean() - discriminator(fake.detach()).mean()
            with amp.scale_loss(loss, trainers[0]) as scaled:
                scaled.backward()
        trainers[0].step(1)
        after_discriminator = _values(discriminator)
        with mx.autograd.record():
            loss = discriminator(head(generator(_batch(number, GOOD) * of_generator))).mean()
            with amp.scale_loss(loss, trainers[1]) as scaled:
                scaled.backward()
        trainers[1].step(1)
        return after_discriminator

    iteration(0, GOOD)
    generators = _values(generator)
    after_discriminator = iteration(1, BAD)
    _assert_equal(_values(discriminator), after_discriminator)
    _assert_equal(_values(generator), generators)


def test_a_copied_trainer_puts_back_as_well():
    net, trainer = _attached()
    _step(net, trainer, _batch(0, GOOD))
    mx.nd.waitall()
    other, copied = copy.deepcopy((net, trainer))
    other.collect_params().reset_ctx(mx.cpu())  # MXNet's copies have no gradients before
    before = _values(other)
    _step(other, copied, _batch(1, BAD))
    _assert_equal(_values(other), before)


@pytest.mark.parametrize(("mode", "when"), [("hybridized", "between steps"), ("eager", "behind the forward pass")])
def test_statistics_that_are_set_stay(mode, when):
    net, trainer = _attached(mode=mode)
    _step(net, trainer, _batch(0, GOOD))
    if when == "between steps":
        net[1].running_mean.set_data(mx.nd.ones(8) * 7)
    with mx.autograd.record():
        loss = net(_batch(1, BAD)).square().mean()
        with amp.scale_loss(loss, trainer) as scaled:
            pass
    if when != "between steps":
        net[1].running_mean.set_data(mx.nd.ones(8) * 7)
    scaled.backward()
    trainer.step(1)
    assert amp.get_loss_scaler(trainer).num_skipped == 1
    np.testing.assert_array_equal(net[1].running_mean.data().asnumpy(), np.full(8, 7, "float32"))


def test_gradients_that_are_asked_for_write_statistics_too():
    net, trainer = _attached(mode="eager")
    _step(net, trainer, _batch(0, GOOD))
    before = _values(net)
    with mx.autograd.record():
        loss = net(_batch(1, GOOD)).square().mean()
    mx.autograd.grad(loss, [net[0].weight.data()])
    mx.nd.waitall()
    assert not np.array_equal(net[1].running_mean.data().asnumpy(), before[4])
    _step(net, trainer, _batch(2, BAD))
    _assert_equal(_values(net), before)
