"""Networks of MXNet's and GluonCV's zoos, with the weights to start from."""
from __future__ import annotations

import argparse

import gluon_amp  # noqa: F401  before mxnet

# isort: split
import mxnet as mx
from mxnet.gluon import HybridBlock
from mxnet.gluon.model_zoo import vision


def make_network(args: argparse.Namespace, classes: int, ctx: mx.Context) -> HybridBlock:
    """Return the network, initialized and hybridized."""
    mx.random.seed(args.seed)
    net = _from_zoo(args.arch, classes, args.pretrained is True)
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2), ctx=ctx)
    net.collect_params().reset_ctx(ctx)  # the zoos load weights to the CPU
    net(mx.nd.zeros((1, 3, args.image_size, args.image_size), ctx=ctx))  # gives every weight its shape
    if isinstance(args.pretrained, str):
        net.load_parameters(args.pretrained, ctx=ctx)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def _from_zoo(name: str, classes: int, pretrained: bool) -> HybridBlock:
    # Pretrained networks have the classes that they were trained on.
    options = {"pretrained": True} if pretrained else {"classes": classes}
    try:
        return vision.get_model(name, **options)
    except ValueError as unknown:  # not in MXNet's own zoo
        try:
            from gluoncv.model_zoo import get_model
        except ImportError:
            raise ValueError(f"{unknown}\nGluonCV has more networks: pip install gluoncv") from unknown
        return get_model(name, **options)
