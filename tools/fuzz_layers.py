"""Random steps that are Gluon's own layers, which run MXNet's legacy or NumPy-style operators."""
from __future__ import annotations

from fuzz_maker import CHANNELS, Adds, Maker
from fuzz_programs import EXACT, Kind

__all__ = ["LAYERS", "LAYERS_ON_FLOATS"]


def _convolution(make: Maker) -> None:
    source = make.pick("map")
    channels, out = make.kinds[source].channels, make.random.choice(CHANNELS)
    width, activation = make.random.choice((1, 3)), make.random.choice((None, "relu"))
    make.bounded(make.add((source,), "<layer>({0})", make.kinds[source]._replace(channels=out),
                          layer=f"gluon.nn.Conv2D, {out}, {width}, padding={width // 2}, in_channels={channels}, "
                                f"use_bias={make.random.random() < 0.5}, activation={activation!r}"))


def _dense(make: Maker) -> None:
    source = make.pick(make.random.choice(("flat", "seq")))
    kind, out = make.kinds[source], make.random.choice(CHANNELS)
    activation = make.random.choice((None, "relu") if make.mode == EXACT else (None, "relu", "tanh", "sigmoid"))
    make.bounded(make.add((source,), "<layer>({0})", kind._replace(channels=out),
                          layer=f"gluon.nn.Dense, {out}, in_units={kind.channels}, flatten=False, "
                                f"use_bias={make.random.random() < 0.6}, activation={activation!r}"))


def _batch_norm(make: Maker) -> None:
    source = make.pick(make.random.choice(("map", "map", "seq")))
    kind = make.kinds[source]
    make.add((source,), "<layer>({0})", kind, layer=f"gluon.nn.BatchNorm, axis={1 if kind.name == 'map' else -1}, "
                                                    f"in_channels={kind.channels}")


def _norm(make: Maker) -> None:
    source = make.pick(make.random.choice(("flat", "seq")))
    make.add((source,), "<layer>({0})", make.kinds[source],
             layer=f"gluon.nn.LayerNorm, in_channels={make.kinds[source].channels}")


def _activation(make: Maker) -> None:
    source = make.pick(make.random.choice(("map", "flat", "seq")))
    layer = make.random.choice(("GELU", "Swish", "ELU, 0.5", "LeakyReLU, 0.1", "Activation, 'softrelu'"))
    make.add((source,), "<layer>({0})", make.kinds[source], layer=f"gluon.nn.{layer}")


def _recurrent(make: Maker) -> None:
    source = make.pick("seq")
    kind, layers, two = make.kinds[source], make.random.choice((1, 1, 2)), make.random.random() < 0.4
    if make.names is not None:  # MXNet's does not know the size of its first state in executors
        raise LookupError(kind)
    make.add((source,), "<layer>({0})", kind._replace(channels=8 * (1 + two)),
             layer=f"gluon.rnn.{make.random.choice(('LSTM', 'GRU', 'RNN'))}, 8, {layers}, layout='NTC', "
                   f"bidirectional={two}, input_size={kind.channels}")


def _positions(make: Maker) -> None:
    source = make.pick("seq")
    kind = make.kinds[source]
    text = ("F.broadcast_add({0}, F.expand_dims(<layer>(F.contrib.arange_like({0}, axis=1)), axis=0))"
            if make.names is None else "{0} + <layer>(F.npx.arange_like({0}, axis=1))")
    make.add((source,), text, kind, layer=f"gluon.nn.Embedding, 200, {kind.channels}")


def _pooling(make: Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    if kind.level > 1:
        raise LookupError(kind)
    layer = "MaxPool2D" if make.mode == EXACT else "AvgPool2D"
    make.add((source,), "<layer>({0})", Kind("map", kind.channels, kind.level + 1), layer=f"gluon.nn.{layer}, 2, 2")


LAYERS: list[Adds] = [_convolution, _dense, _pooling]
LAYERS_ON_FLOATS: list[Adds] = [_batch_norm, _norm, _activation, _recurrent, _positions]
