"""What the tests of distributed training run in every process: small training runs, whose results go to files.

    python tests/helpers/start_processes.py kvstore 2 tests/helpers/distributed_worker.py kvstore scenarios OUT
    python tests/helpers/start_processes.py kvstore 2 tests/helpers/distributed_worker.py kvstore train OUT --kill-at 3

A process that is started alone, or the test itself, trains on the joint batch for comparison.
"""
from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import traceback
from pathlib import Path

import gluon_amp as amp  # before MXNet: it prepares NumPy for it
from gluon_amp.machine.dtypes import BFLOAT16_DTYPE

if __name__ == "__main__" and sys.argv[1] == "horovod":
    import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from cpu_kinds import LOW, RUNS_BFLOAT16
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, STEPS = 8, 6
_names = itertools.count()


class Worker:
    """One of ``size`` processes, and how they train together."""

    def __init__(self, engine: str, rank: int = 0, size: int = 1):
        self.engine, self.rank, self.size = engine, rank, size

    def share(self, joint):
        """This process's part of a joint batch."""
        return mx.nd.array(joint[self.rank::self.size], dtype=joint.dtype)

    def trainer(self, net, optimizer="sgd", store="dist_sync", hyper=None):
        hyper = hyper or {"learning_rate": 0.1, "momentum": 0.9}
        parameters = net.collect_params()
        if self.engine == "horovod":
            return hvd.DistributedTrainer(parameters, optimizer, hyper, prefix=f"{next(_names)}.")
        return gluon.Trainer(parameters, optimizer, hyper, kvstore=store if self.engine == "kvstore" else "device")

    def step_size(self, joint=BATCH):
        """What ``trainer.step`` takes: Horovod averages over the processes, the KVStore adds up."""
        return joint // self.size if self.engine == "horovod" else joint


def dense_net(seed=3):
    mx.random.seed(seed)
    np.random.seed(seed)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(16, activation="relu", in_units=6), nn.Dense(4, in_units=16))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def joint_batches(steps=STEPS):
    random = np.random.RandomState(0)
    return [(random.randn(BATCH, 6).astype("float32"), random.randint(0, 4, BATCH).astype("float32"))
            for _ in range(steps)]


def backward(worker, net, trainer, batch, poison=False):
    data, label = (worker.share(part) for part in batch)
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(data), label)
        loss = loss * float("inf") if poison else loss
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)


def weights(net):
    return {name: value.data().asnumpy() for name, value in net.collect_params().items()}


# Scenarios: each returns arrays by name.

def plain(worker, dtype=None, store="dist_sync"):
    """FP32, or bfloat16 on this machine: the weights after some steps."""
    net = dense_net()
    if dtype is None:
        amp.exclude(net)
    trainer = worker.trainer(net, store=store)
    amp.init_trainer(trainer, 1024.0)
    for batch in joint_batches():
        backward(worker, net, trainer, batch)
        trainer.step(worker.step_size())
    return weights(net)


def low_precision(worker):
    return plain(worker, "bfloat16")


def other_store(worker):
    return plain(worker, store="dist_device_sync")


def either_store(worker):
    """The store that is the same with either engine."""
    return plain(Worker("kvstore", worker.rank, worker.size), store=amp.parallel.kvstore())


def beginnings(worker):
    """First steps of many trainers: what the store sends as weights and as gradients must not get mixed up."""
    found = {}
    for number in range(20):
        net = dense_net(number)
        amp.exclude(net)
        trainer = worker.trainer(net)
        amp.init_trainer(trainer, 8.0)
        backward(worker, net, trainer, joint_batches(1)[0])
        trainer.step(worker.step_size())
        found.update({f"{name}.{number}": value for name, value in weights(net).items()})
    return found


def overflow(worker):
    """The loss of the last process is infinite in step 2, for one of two networks."""
    nets = dense_net(), dense_net(4)
    amp.exclude(*nets)
    trainers = [worker.trainer(net) for net in nets]
    for trainer in trainers:
        amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=256, growth_interval=3))
    scales, skipped, kept = [], [], []
    for number, batch in enumerate(joint_batches()):
        before = [weights(net) for net in nets]
        for index, (net, trainer) in enumerate(zip(nets, trainers)):
            backward(worker, net, trainer, batch, index == 0 and number == 2 and worker.rank == worker.size - 1)
            trainer.step(worker.step_size())
        scales.append([trainer._amp_loss_scaler.loss_scale for trainer in trainers])
        skipped.append([trainer._amp_loss_scaler.step_was_skipped for trainer in trainers])
        kept.append([all((old[name] == value).all() for name, value in weights(net).items())
                     for old, net in zip(before, nets)])
    return {**weights(nets[0]), "other": weights(nets[1])["net_dense0_weight"], "scales": scales, "skipped": skipped,
            "kept": kept}


def embedding(worker, sparse=True, poison=False):
    """Row-sparse gradients, of other rows in each process; lazy updates leave the other rows alone."""
    mx.random.seed(5)
    net = nn.HybridSequential(prefix="embedding_")
    with net.name_scope():
        net.add(nn.Embedding(50, 3, sparse_grad=sparse), nn.Dense(4))
    net.initialize(mx.init.Xavier())
    amp.exclude(net)
    net(mx.nd.zeros((1, 2)))
    trainer = worker.trainer(net)
    amp.init_trainer(trainer, 64.0)
    random = np.random.RandomState(1)
    for number in range(4):
        words = random.randint(0, 20, (BATCH, 2)).astype("float32")
        label = random.randint(0, 4, BATCH).astype("float32")
        backward(worker, net, trainer, (words, label), poison and number == 1 and worker.rank == 0)
        trainer.step(worker.step_size())
    return {**weights(net), "num_skipped": trainer._amp_loss_scaler.num_skipped}


def embedding_overflow(worker):
    return embedding(worker, poison=True)


class Branches(gluon.Block):
    """Samples below zero use one layer, the others another."""

    def __init__(self):
        super().__init__(prefix="branches_")
        with self.name_scope():
            self.low, self.high, self.never = (nn.Dense(1, in_units=2) for _ in range(3))

    def forward(self, data):
        return self.low(data) if data[0, 0].asscalar() < 0 else self.high(data)


def stale(worker, ranks=()):
    """Process 0 alone uses one layer in step 0, and the other one in step 1; no process uses the third.

    One process may compute the losses of all ``ranks``.
    """
    mx.random.seed(6)
    net = Branches()
    net.initialize()
    amp.exclude(net)
    trainer = worker.trainer(net)
    amp.init_trainer(trainer, 16.0)
    for sign in (-1, 1):
        with autograd.record():
            losses = [(net(mx.nd.array([[sign if rank == 0 else -sign, rank + 1]])) ** 2).sum()
                      for rank in ranks or [worker.rank]]
            with amp.scale_loss(sum(losses), trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(worker.step_size(worker.size), ignore_stale_grad=True)
    return weights(net)


class Constant(gluon.Block):
    """Its gradient is what it is given."""

    def __init__(self, dtype):
        super().__init__(prefix="constant_")
        with self.name_scope():
            self.value = self.params.get("value", shape=(3,), init="zeros", dtype=dtype)

    def forward(self, gradient):
        return (self.value.data() * gradient).sum()


def reduced(worker, dtype, gradient, **options):
    """Reduce gradients that are given; return them, the norm that clipping reports, and the parameter after a step."""
    net = Constant(dtype)
    net.initialize()
    trainer = worker.trainer(net, hyper={"learning_rate": 1.0, "multi_precision": dtype == "float16"})
    amp.init_trainer(trainer, 2.0, **options)
    with autograd.record(), amp.scale_loss(net(mx.nd.array(gradient, dtype=dtype)), trainer) as scaled:
        autograd.backward(scaled)
    trainer.allreduce_grads()
    found = net.value.grad().asnumpy()
    norm = amp.clip_global_norm(trainer, 1e9)
    num_bytes = trainer._amp_loss_scaler.reduction.num_bytes
    trainer.update(1)
    master = next(iter(amp.master_params(trainer))).asnumpy()
    return {"gradient": found, "norm": norm, "value": master, "num_bytes": num_bytes,
            "skipped": trainer._amp_loss_scaler.step_was_skipped}


def float16_gradients(worker):
    """Half of the sum fits in float16, the sum does not; thirds lose bits in float16 sums, none in FP32."""
    large = [20000.0, 1.0, -1.0]
    mixed = [2048.0 if worker.rank == 0 else 1.0, 1.0, -1.0]
    cases = {"overflow": reduced(worker, "float16", large),
             "predivided": reduced(worker, "float16", large, gradient_predivide_factor=8.0),
             "lifted": reduced(worker, "float16", mixed, allreduce_always_fp32=True, gradient_predivide_factor=1.0),
             "float32": reduced(worker, "float32", mixed, gradient_predivide_factor=4.0)}
    return {f"{case}_{name}": value for case, found in cases.items() for name, value in found.items()}


def contexts(worker):
    """Two contexts in every process."""
    both = [mx.cpu(0), mx.cpu(1)]
    net = dense_net()
    net.collect_params().reset_ctx(both)
    amp.exclude(net)
    trainer = worker.trainer(net)
    amp.init_trainer(trainer, 256.0)
    for joint in joint_batches(3):
        parts = [gluon.utils.split_and_load(worker.share(part), both) for part in joint]
        with autograd.record():
            losses = [gluon.loss.SoftmaxCrossEntropyLoss()(net(data), label) for data, label in zip(*parts)]
            with amp.scale_loss(losses, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(worker.step_size())
    return {f"{name}@{number}": value.data(context).asnumpy() for name, value in net.collect_params().items()
            for number, context in enumerate(both)}


def accumulated(worker):
    """Two micro-batches, clipped, then an overflow in process 0, whose sum must be gone afterwards."""
    net = dense_net()
    amp.exclude(net)
    net.collect_params().setattr("grad_req", "add")
    trainer = worker.trainer(net)
    amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=512))
    batches, norms = joint_batches(6), []
    for number in range(0, 6, 2):
        for batch in batches[number:number + 2]:
            backward(worker, net, trainer, batch, poison=number == 2 and worker.rank == 0)
        if number:
            trainer.allreduce_grads()
        if number == 4:
            amp.unscale(trainer)
        norms.append(amp.clip_global_norm(trainer, 2.0 * BATCH) / BATCH)
        (trainer.update if number else trainer.step)(worker.step_size())
        for parameter in net.collect_params().values():
            parameter.zero_grad()
    return {**weights(net), "norms": norms, "num_skipped": trainer._amp_loss_scaler.num_skipped}


def losses(worker):
    """Two losses with a scaler each, in a network that is cast as a whole; the second is infinite in process 0."""
    amp.deinit()
    net = dense_net()
    net, trainer = amp.initialize(net, worker.trainer(net), opt_level="O2", cast_model_type="float16",
                                  loss_scale="dynamic", num_losses=2, verbosity=0)
    parameters = net.collect_params()
    parameters.setattr("grad_req", "add")
    scales = []
    for number, batch in enumerate(joint_batches(4)):
        data, label = (worker.share(part) for part in batch)
        parameters.zero_grad()
        for loss_id in range(2):
            with autograd.record():
                output = net(data)
                loss = (output ** 2).sum(axis=1) if loss_id else gluon.loss.SoftmaxCrossEntropyLoss()(output, label)
                loss = loss * (float("inf") if number == 1 and loss_id and worker.rank == 0 else 2.0 ** -8)
                with amp.scale_loss(loss, trainer, loss_id) as scaled:
                    autograd.backward(scaled)
        trainer.step(worker.step_size())
        scales.append([scaler.loss_scale for scaler in trainer._amp_loss_scaler.scalers])
    return {**weights(net), "scales": scales}


class Centre(mx.operator.CustomOp):
    """Subtract the mean over the joint batch."""

    @amp.autocast(enabled=False)
    def forward(self, is_train, req, in_data, out_data, aux):
        mean = amp.parallel.allreduce(in_data[0].mean(axis=0), average=True, name="forward")
        self.assign(out_data[0], req[0], in_data[0] - mean)

    @amp.autocast(enabled=False)
    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        mean = amp.parallel.allreduce(out_grad[0].mean(axis=0), average=True, name="backward")
        self.assign(in_grad[0], req[0], out_grad[0] - mean)


@mx.operator.register("test_distributed_centre")
class CentreProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Centre()


def operator(worker):
    """Sums over the processes within the forward and the backward pass, in MXNet's threads."""
    for name in ("forward", "backward"):
        amp.parallel.prepare(name, (16,))
    net = dense_net()
    head, tail = net
    amp.exclude(head, tail)
    trainer = worker.trainer(net)
    amp.init_trainer(trainer, 256.0)
    for batch in joint_batches(3):
        data, label = (worker.share(part) for part in batch)
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(
                tail(mx.nd.Custom(head(data), op_type="test_distributed_centre")), label)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(worker.step_size())
    return weights(net)


def misuse(worker):
    """Messages of errors that every process must raise alike."""
    found = {}

    def record(name, function):
        try:
            function()
        except amp.AmpError as error:
            found[name] = str(error)

    net = dense_net()
    trainer = worker.trainer(net)
    amp.init_trainer(trainer, 2.0 ** (worker.rank + 1))
    batch = joint_batches(1)[0]
    backward(worker, net, trainer, batch)
    record("scales", lambda: trainer.step(1))
    net.collect_params().setattr("grad_req", "add")
    backward(worker, net, trainer, batch)
    record("not_reduced", lambda: trainer.update(1))
    trainer.allreduce_grads()
    record("twice", lambda: trainer.step(1))
    record("mixed", lambda: backward(worker, net, trainer, batch))
    return found


def sums(worker):
    """The primitive, in the types that it takes."""
    value = worker.rank + 1.0
    shape = mx.nd.array([[value, -value]])
    low = mx.nd.amp_cast(mx.nd.array([value * 256]), dtype=BFLOAT16_DTYPE)
    return {"sum": amp.parallel.allreduce(shape).asnumpy(),
            "mean": amp.parallel.allreduce(shape.astype("float16"), average=True).asnumpy(),
            "named": np.stack([amp.parallel.allreduce(mx.nd.array([value * step]), name="statistics").asnumpy()
                               for step in range(4)]),
            "bfloat16": amp.parallel.allreduce(low).asnumpy(), "kept": shape.asnumpy(),
            "world": [amp.parallel.rank(), amp.parallel.size()], "engine": amp.parallel.engine()}


SCENARIOS = (plain, other_store, either_store, beginnings, overflow, embedding, embedding_overflow, stale,
             float16_gradients, contexts, accumulated, losses, operator, misuse, sums)
NEEDS_BF16 = (low_precision,)


def run_scenarios(worker, out):
    for scenario in SCENARIOS + (NEEDS_BF16 if RUNS_BFLOAT16 else ()):
        amp.deinit()
        amp.init(LOW)
        np.savez(out / f"{scenario.__name__}.{worker.rank}.npz", **scenario(worker))


def train(worker, out, kill_at):
    """Train with checkpoints; the last process kills itself in one step."""
    amp.init("float16")
    net = dense_net()
    trainer = worker.trainer(net, "adam", hyper={"learning_rate": 0.01})
    amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=2.0 ** 10, growth_interval=2))
    begin, saved = 0, out / "step"
    if saved.exists():
        begin = int(saved.read_text())
        net.load_parameters(str(out / f"{begin}.params"))
        amp.load_states(trainer, out / f"{begin}.states")
        print(f"resuming after step {begin}")
    for number, batch in enumerate(joint_batches()[begin:], begin):
        if number == kill_at and worker.rank == worker.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(worker, net, trainer, batch, poison=number == 1)
        trainer.step(worker.step_size())
        if worker.rank == 0 and number % 2:
            net.save_parameters(str(out / f"{number + 1}.params"))
            amp.save_states(trainer, out / f"{number + 1}.states")
            saved.write_text(str(number + 1))
    np.savez(out / f"train.{worker.rank}.npz", **weights(net), scale=trainer._amp_loss_scaler.loss_scale)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["kvstore", "horovod", "none"])
    parser.add_argument("what", choices=["scenarios", "train"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill-at", type=int, default=-1)
    arguments = parser.parse_args()
    world = amp.parallel.world()  # initializes Horovod where that started the process
    worker = Worker(arguments.engine, world.rank, world.size)
    if arguments.what == "scenarios":
        run_scenarios(worker, arguments.out)
    else:
        train(worker, arguments.out, arguments.kill_at)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at Python's own end the KVStore would wait for the other workers, which wait for this one
