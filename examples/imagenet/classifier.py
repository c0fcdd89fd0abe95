"""Networks of MXNet's and GluonCV's zoos, with the weights to start from."""
from __future__ import annotations

import argparse
import re
from difflib import get_close_matches

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
        _load(net, args, ctx)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def _load(net: HybridBlock, args: argparse.Namespace, ctx: mx.Context) -> None:
    try:
        net.load_parameters(args.pretrained, ctx=ctx)
    except (AssertionError, ValueError, mx.MXNetError) as error:  # MXNet's words for files of another network, or none
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"{args.pretrained}: expected weights of {args.arch}, as net.save_parameters writes them: "
                         f"{reason}") from error


def _from_zoo(name: str, classes: int, pretrained: bool) -> HybridBlock:
    # Pretrained networks have the classes that they were trained on.
    options = {"pretrained": True} if pretrained else {"classes": classes}
    try:
        return vision.get_model(name, **options)
    except ValueError as unknown:  # not in MXNet's own zoo
        try:
            from gluoncv.model_zoo import get_model
        except ImportError:
            raise ValueError(f"{_not_in(str(unknown), name)}. GluonCV has more: pip install 'gluon_amp[tutorial]'"
                             ) from unknown
    try:
        return get_model(name, **options)
    except ValueError as unknown:
        raise ValueError(_not_in(str(unknown), name)) from unknown


def _not_in(message: str, name: str) -> str:
    """Say that a zoo, whose message lists all that it has, does not have a network."""
    known = [word for word in re.findall(r"[\w.]+", message) if word != name]
    closest = get_close_matches(name, known, cutoff=0)
    return f"expected a network of the zoo, received --arch {name}; the closest names are {', '.join(closest)}"
