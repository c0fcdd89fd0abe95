"""Random steps of ``mx.np`` and ``mx.npx`` operators, as blocks under ``npx.set_np`` are written."""
from __future__ import annotations

from fuzz_maker import CHANNELS, Adds, Maker, binary, unary
from fuzz_operators import (
    along_sequence,
    attention,
    batch_norm,
    convolution,
    deconvolution,
    dense,
    depthwise,
    norm,
    pooling,
    sequence_batch_norm,
    to_flat,
)
from fuzz_programs import EXACT, Kind

__all__ = ["COMMON", "NAMES", "ON_FLOATS", "ON_INTEGERS"]

# What operators of mx.nd are called, whose arguments are the same.
NAMES = {"Activation": "npx.activation", "BatchNorm": "npx.batch_norm", "Convolution": "npx.convolution",
         "Deconvolution": "npx.deconvolution", "Dropout": "npx.dropout", "FullyConnected": "npx.fully_connected",
         "LayerNorm": "npx.layer_norm", "Pooling": "npx.pooling", "batch_dot": "npx.batch_dot", "clip": "np.clip",
         "max": "np.max", "mean": "np.mean", "softmax": "npx.softmax", "swapaxes": "np.swapaxes"}
_SCALAR = Kind("scalar", 1)
_LETTERS = {"map": "nchw,dc->ndhw", "seq": "ntc,dc->ntd", "flat": "nc,dc->nd"}
_KINDS = ("map", "seq", "flat")


def _product(make: Maker) -> None:
    source = make.pick(make.random.choice(("flat", "seq")))
    kind, out = make.kinds[source], make.random.choice(CHANNELS)
    axis = 1 if kind.name == "flat" else 2
    text, turned = make.random.choice((
        (f"F.np.tensordot({{0}}, <0>, axes=(({axis},), (1,)))", False), ("F.np.dot({0}, <0>)", True),
        ("F.np.matmul({0}, <0>)", True), ("F.np.matmul({0}, F.np.transpose(<0>))", False),
        (f"F.np.einsum('{_LETTERS[kind.name]}', {{0}}, <0>)", False)))
    shape = (kind.channels, out) if turned else (out, kind.channels)
    make.bounded(make.add((source,), text, kind._replace(channels=out), make.weight("w", shape)))


def _pixelwise(make: Maker) -> None:
    source = make.pick("map")
    kind, out = make.kinds[source], make.random.choice(CHANNELS)
    make.bounded(make.add((source,), f"F.np.einsum('{_LETTERS['map']}', {{0}}, <0>)", kind._replace(channels=out),
                          make.weight("w", (out, kind.channels))))


def _axis(kind: Kind) -> int:
    """Return the axis of channels."""
    return 2 if kind.name == "seq" else 1


def _concatenate(make: Maker) -> None:
    first = make.pick(make.random.choice(_KINDS))
    kind = make.kinds[first]
    second = make.random.choice([number for number, one in enumerate(make.kinds)
                                 if (one.name, one.level) == (kind.name, kind.level)])
    channels = kind.channels + make.kinds[second].channels
    if channels <= 96:
        make.add((first, second), f"F.np.concatenate([{{0}}, {{1}}], axis={_axis(kind)})",
                 kind._replace(channels=channels))


def _split(make: Maker) -> None:
    source = make.pick(make.random.choice(_KINDS))
    kind = make.kinds[source]
    half, axis = kind.channels // 2, _axis(kind)
    if kind.channels % 16 == 0:
        before = ":, " * axis
        text = make.random.choice((  # both outputs are read: MXNet leaves the gradient of one that is not unwritten
            f"F.np.add(*F.np.split({{0}}, 2, axis={axis}))", f"{{0}}[{before}:{half}]", f"{{0}}[{before}{half}:]",
            f"F.npx.slice({{0}}, begin=({'None, ' * axis}{half},), end=({'None, ' * axis}None,))"))
        make.add((source,), text, kind._replace(channels=half))


def _broadcast(make: Maker) -> None:
    source = make.pick(make.random.choice(_KINDS))
    kind = make.kinds[source]
    shape = make.random.choice(((kind.channels, 1, 1) if kind.name == "map" else (kind.channels,), (1,)))
    text = make.random.choice(("{0} + <0>", "<0> - {0}") if make.mode == EXACT else
                              ("{0} + <0>", "{0} * <0>", "F.np.multiply(<0>, {0})", "{0} / (F.np.abs(<0>) + 1)"))
    make.bounded(make.add((source,), text, kind, make.weight("gamma" if "*" in text else "beta", shape)))


def _reduced(make: Maker) -> None:
    source = make.pick(make.random.choice(_KINDS))
    make.add((source,), make.random.choice(("F.np.max({0})",) if make.mode == EXACT else (
        "F.np.mean({0})", "F.np.sum({0}) * 0.01", "{0}.mean()", "F.np.mean(F.np.square({0}))",
        "F.np.sqrt(F.np.sum({0} * {0}) + 1) * 0.1")), _SCALAR)


def _with_scalar(make: Maker) -> None:
    scalar, other = make.pick("scalar"), make.pick(make.random.choice((*_KINDS, "scalar")))
    text = make.random.choice(("{0} + {1}", "{1} - {0}") if make.mode == EXACT else
                              ("{0} + {1}", "{0} * F.np.tanh({1})", "{0} / (F.np.abs({1}) + 1)"))
    make.bounded(make.add((other, scalar), text, make.kinds[other]))


def _to_sequence(make: Maker) -> None:
    source = make.pick("map")
    text = make.random.choice(("F.np.transpose(F.npx.reshape({0}, (-2, -2, -1)), (0, 2, 1))",
                               "F.np.swapaxes(F.npx.reshape({0}, (-2, -2, -5)), 1, 2)"))
    make.add((source,), text, make.kinds[source]._replace(name="seq"))


def _excite(make: Maker) -> None:
    target = make.pick("map")
    source = make.pick(Kind("flat", make.kinds[target].channels))
    wide = make.random.choice(("F.npx.reshape({1}, (-2, -2, 1, 1))",
                               "F.np.expand_dims(F.np.expand_dims({1}, 2), 3)"))
    make.add((target, source), f"{{0}} * F.npx.sigmoid({wide})", make.kinds[target])


def _heads(make: Maker) -> None:
    """Add attention of several heads, as it is written with these operators."""
    source = make.pick("seq")
    kind = make.kinds[source]
    split = "F.np.transpose(F.npx.reshape({}, (-2, -2, 4, -1)), (0, 2, 1, 3))"
    query, key, value = (split.format(f"F.npx.fully_connected({{0}}, <{number}>, num_hidden={kind.channels}, "
                                      "flatten=False, no_bias=True)") for number in range(3))
    scale = (kind.channels // 4) ** -0.5
    weighted = make.random.choice((
        f"F.np.matmul(F.npx.softmax(F.np.matmul({query} * {scale:.3f}, F.np.swapaxes({key}, 2, 3)), axis=-1), {value})",
        f"F.np.einsum('nhqk,nhkc->nhqc', F.npx.softmax(F.np.einsum('nhqc,nhkc->nhqk', {query} * {scale:.3f}, {key})), "
        f"{value})"))
    make.add((source,), f"F.npx.reshape(F.np.transpose({weighted}, (0, 2, 1, 3)), (-2, -2, -5))", kind,
             *(make.weight("w", (kind.channels, kind.channels)) for _ in range(3)))


def _positions(make: Maker) -> None:
    source = make.pick("seq")
    kind = make.kinds[source]
    text = make.random.choice((
        f"F.npx.embedding(F.npx.arange_like({{0}}, axis=1), <0>, input_dim=200, output_dim={kind.channels})",
        "F.np.take(<0>, F.npx.arange_like({0}, axis=1), axis=0, mode='clip')"))
    make.add((source,), f"{{0}} + {text}", kind, make.weight("e", (200, kind.channels)))


def _centred(make: Maker) -> None:
    """Add a normalization that is written out."""
    source = make.pick(make.random.choice(_KINDS))
    kind = make.kinds[source]
    centred = f"({{0}} - F.np.mean({{0}}, axis={_axis(kind)}, keepdims=True))"
    make.add((source,), make.random.choice((centred, f"{centred} / F.np.sqrt(F.np.mean({centred} ** 2, "
                                            f"axis={_axis(kind)}, keepdims=True) + 0.1)")), kind)


COMMON: list[Adds] = [
    convolution, convolution, dense, dense, depthwise, along_sequence, deconvolution, pooling, to_flat, _to_sequence,
    _product, _product, _pixelwise, _concatenate, _split, _broadcast, _reduced, _with_scalar, _with_scalar,
    binary("{0} + {1}", "F.np.add({0}, {1})"), binary("{0} - {1}", "F.np.subtract({0}, {1})"),
    binary("F.np.where({0} > {1}, {0}, {1})", "F.np.maximum({0}, {1})", "F.np.minimum({0}, {1})",
           "F.np.sum(F.np.stack([{0}, {1}], axis=1), axis=1)"),
    unary("F.npx.relu({0})", "F.npx.activation({0}, act_type='relu')", "F.np.maximum({0}, 0)",
          "F.np.clip({0}, -2, 2)", "F.np.where({0} > 0, {0}, 0)"),
    unary("F.np.abs({0})", "-{0}", "F.np.copy({0})", "F.np.flip({0}, 1)",
          "F.np.squeeze(F.np.expand_dims({0}, 1), 1)", "({0}.astype('float64') * 0.5).astype('float32') * 2",
          "({0}.astype('float16') * 2).astype('float32') * 0.5", "F.np.roll({0}, shift=1, axis=0)"),
    unary("F.npx.reshape(F.npx.reshape({0}, (-2, -6, 4, -1, -4)), (-2, -5, -4))",
          "F.np.moveaxis(F.np.moveaxis({0}, 1, 2), 2, 1)", "F.np.swapaxes(F.np.swapaxes({0}, 1, 3), 1, 3)",
          kinds=("map",)),
    unary("F.np.sum(F.np.tile(F.np.expand_dims({0}, 3), (1, 1, 1, 2)), axis=3) * 0.5",
          "F.npx.reshape(F.npx.reshape({0}, (-2, -2, 4, -1)), (-2, -2, -5))", "F.np.einsum('ntc->ntc', {0})",
          kinds=("seq",))]
ON_INTEGERS: list[Adds] = [binary("{0} - F.np.where({0} > {1}, {1}, {0})")]
ON_FLOATS: list[Adds] = [
    batch_norm, batch_norm, norm, norm, sequence_batch_norm, attention, _excite, _heads, _heads, _positions, _centred,
    binary("{0} * F.np.tanh({1})", "F.np.multiply(F.npx.sigmoid({0}), {1})", "{0} / (F.np.abs({1}) + 1)",
           "F.np.hypot({0}, F.np.abs({1}) + 1) * 0.5", "F.np.true_divide({0}, F.np.square({1}) + 1)"),
    unary(*(f"F.npx.activation({{0}}, act_type='{kind}')" for kind in ("sigmoid", "tanh", "softrelu", "softsign"))),
    unary("F.npx.leaky_relu({0}, act_type='leaky', slope=0.1)", "F.npx.leaky_relu({0}, act_type='gelu')",
          "F.npx.leaky_relu({0}, act_type='elu', slope=0.5)", "F.np.where({0} > 0, {0}, {0} * 0.1)"),
    unary("{0} * 0.5", "{0} + 0.5", "1 - {0}", "1 / (F.np.abs({0}) + 1)", "F.np.tanh({0})", "F.np.exp(-F.np.abs({0}))",
          "F.np.square(F.np.tanh({0}))", "F.np.tanh({0}) ** 2", "F.np.sqrt(F.np.abs({0}) + 1)", "F.npx.sigmoid({0})",
          "F.npx.erf({0})", "F.np.log(F.np.abs({0}) + 1)", "F.np.log1p(F.np.abs({0}))", "F.np.arctan({0})",
          "F.npx.smooth_l1({0}, scalar=1)", "F.np.reciprocal(F.np.abs({0}) + 1)", "F.np.cbrt(F.np.abs({0}) + 1)",
          "F.np.power(F.np.abs({0}) + 1, 0.5)", "F.np.sin({0})", "F.np.cos({0})", "F.np.expm1(-F.np.abs({0}))",
          "{0} / (F.np.sum(F.np.abs({0}), axis=1, keepdims=True) + 1) * 4",
          "{0} / (F.np.linalg.norm(F.np.abs({0}) + 0.1, axis=1, keepdims=True) + 1) * 4"),
    unary("F.npx.softmax({0}, axis=1)", "F.npx.log_softmax({0}, axis=1) * 0.2", "F.npx.softmax({0}, temperature=2.0)",
          "F.np.exp({0} * 0.2) / F.np.sum(F.np.exp({0} * 0.2), axis=1, keepdims=True)")]
