"""Random steps of networks: operators of MXNet with the shapes and parameters that they take."""
from __future__ import annotations

from fuzz_loops import loop
from fuzz_maker import CHANNELS, Adds, Maker, binary, unary
from fuzz_programs import EXACT, Kind, Step

__all__ = ["COMMON", "ON_FLOATS", "ON_INTEGERS", "along_sequence", "attention", "batch_norm", "convolution",
           "deconvolution", "dense", "depthwise", "dropout", "norm", "output_operator", "pooling",
           "sequence_batch_norm", "telltale", "to_flat"]


def convolution(make: Maker) -> None:
    source = make.pick("map")
    _, channels, level = make.kinds[source]
    out = make.random.choice(CHANNELS) if make.random.random() < 0.4 else channels
    kernel = make.random.choice((1, 3))
    stride = 2 if level < 2 and make.random.random() < 0.15 else 1
    group = make.random.choice([1] * 5 + [8]) if out % 8 == 0 else 1
    weight = make.weight("w", (out, channels // group, kernel, kernel))
    bias = [make.weight("b", (out,))] if make.random.random() < 0.6 else []
    text = (f"F.Convolution({{0}}, <0>{', <1>' * len(bias)}, kernel=({kernel}, {kernel}), pad=({kernel // 2}, "
            f"{kernel // 2}), stride=({stride}, {stride}), num_filter={out}, num_group={group}, no_bias={not bias})")
    make.bounded(make.add((source,), text, Kind("map", out, level + (stride == 2)), weight, *bias))


def dense(make: Maker) -> None:
    source = make.pick(make.random.choice(("flat", "seq")))
    kind = make.kinds[source]
    out = make.random.choice(CHANNELS) if make.random.random() < 0.4 else kind.channels
    bias = [make.weight("b", (out,))] if make.random.random() < 0.6 else []
    text = (f"F.FullyConnected({{0}}, <0>{', <1>' * len(bias)}, num_hidden={out}, flatten=False, no_bias={not bias})")
    make.bounded(make.add((source,), text, kind._replace(channels=out), make.weight("w", (out, kind.channels)), *bias))


def _concat(make: Maker) -> None:
    first = make.pick(make.random.choice(("map", "flat", "seq")))
    kind = make.kinds[first]
    alike = [number for number, one in enumerate(make.kinds) if (one.name, one.level) == (kind.name, kind.level)]
    second = make.random.choice(alike)
    channels = kind.channels + make.kinds[second].channels
    if channels <= 96:
        axis = 2 if kind.name == "seq" else 1
        make.add((first, second), f"F.concat({{0}}, {{1}}, dim={axis})", kind._replace(channels=channels))


def _slice(make: Maker) -> None:
    source = make.pick(make.random.choice(("map", "flat", "seq")))
    kind = make.kinds[source]
    axis = 2 if kind.name == "seq" else 1
    if kind.channels % 16 == 0:
        # Both outputs are read: MXNet leaves the gradient of one that is not uninitialised, with static_alloc=True.
        text = make.random.choice((f"F.add_n(*F.SliceChannel({{0}}, num_outputs=2, axis={axis}))",
                                   f"F.slice_axis({{0}}, axis={axis}, begin=0, end={kind.channels // 2})"))
        make.add((source,), text, kind._replace(channels=kind.channels // 2))


def batch_norm(make: Maker) -> None:
    source = make.pick("map")
    channels = make.kinds[source].channels
    make.add((source,), "F.BatchNorm({0}, <0>, <1>, <2>, <3>, fix_gamma=False, eps=1e-3)", make.kinds[source],
             *(make.weight(role, (channels,)) for role in ("gamma", "beta", "mean", "var")))


def norm(make: Maker) -> None:
    source = make.pick(make.random.choice(("flat", "seq")))
    channels = make.kinds[source].channels
    make.add((source,), "F.LayerNorm({0}, <0>, <1>, axis=-1)", make.kinds[source],
             make.weight("gamma", (channels,)), make.weight("beta", (channels,)))


def _scaled(make: Maker) -> None:
    source = make.pick("map")
    channels = make.kinds[source].channels
    make.add((source,), "F.broadcast_mul({0}, <0>)", make.kinds[source], make.weight("gamma", (1, channels, 1, 1)))


def pooling(make: Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    types = ("max",) if make.mode == EXACT else ("avg",)  # rounding decides which of two close values is the largest
    if kind.level < 2 and make.random.random() < 0.4:
        text, kind = "kernel=(2, 2), stride=(2, 2)", kind._replace(level=kind.level + 1)
    else:
        text = "kernel=(3, 3), pad=(1, 1), stride=(1, 1)"
    make.add((source,), f"F.Pooling({{0}}, pool_type='{make.random.choice(types)}', {text})", kind)


def _enlarged(make: Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    if kind.level:
        make.add((source,), "F.UpSampling({0}, scale=2, sample_type='nearest')", kind._replace(level=kind.level - 1))


def to_flat(make: Maker) -> None:
    source = make.pick(make.random.choice(("map", "map", "seq")))
    kind = make.kinds[source]
    reduce = "max" if make.mode == EXACT else "mean"
    axes = "1" if kind.name == "seq" else "(2, 3)"
    make.add((source,), f"F.{reduce}({{0}}, axis={axes})", Kind("flat", kind.channels))


def _to_sequence(make: Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    make.add((source,), "F.transpose(F.reshape({0}, (0, 0, -1)), (0, 2, 1))", kind._replace(name="seq"))


def _excite(make: Maker) -> None:
    target = make.pick("map")
    source = make.pick(Kind("flat", make.kinds[target].channels))
    make.add((target, source), "F.broadcast_mul({0}, F.sigmoid(F.reshape({1}, (0, -1, 1, 1))))", make.kinds[target])


def attention(make: Maker) -> None:
    query = make.pick("seq")
    key = make.pick(make.kinds[query])
    scale = make.kinds[query].channels ** -0.5
    make.add((query, key), f"F.batch_dot(F.softmax(F.batch_dot({{0}} * {scale:.3f}, {{1}}, transpose_b=True)), {{1}})",
             make.kinds[query])


def _recurrent(make: Maker) -> None:
    """Add a recurrent layer as Gluon writes it: parameters joined in the graph, states that have gradients."""
    source = make.pick("seq")
    kind = make.kinds[source]
    mode = make.random.choice(("lstm", "gru", "rnn_tanh", "rnn_relu"))
    layers, directions = make.random.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    size, gates = 8, {"lstm": 4, "gru": 3}.get(mode, 1)
    widths = [kind.channels, *[size * directions] * (layers - 1)]
    weights = [make.weight("w", (gates * size, width)) for layer in widths for _ in range(directions)
               for width in (layer, size)]
    biases = [make.weight("b", (gates * size,)) for _ in weights]
    joined = ", ".join(f"F.reshape(<{number}>, (-1,))" for number in range(2 * len(weights)))
    state = (f"F.repeat(F.slice_axis(F.slice_axis(F.swapaxes({{0}}, 0, 1), axis=0, begin=0, end=1), axis=2, begin=0, "
             f"end={size}), repeats={layers * directions}, axis=0)")
    states = [state, *[f"F.tanh({state})"] * (mode == "lstm")]
    call = (f"F.RNN(F.swapaxes({{0}}, 0, 1), F._internal._rnn_param_concat({joined}, dim=0), {', '.join(states)}, "
            f"state_size={size}, num_layers={layers}, mode='{mode}', bidirectional={directions == 2}")
    if make.random.random() < 0.5:
        text = f"F.swapaxes({call}), 0, 1)"
    else:  # the states are read, too
        last = "F.concat(r[1], r[1], dim=2)" if directions == 2 else "r[1]"
        text = (f"F.swapaxes(F.broadcast_add((r := {call}, state_outputs=True))[0], "
                f"F.slice_axis({last}, axis=0, begin=0, end=1)), 0, 1)")
    make.add((source,), text, kind._replace(channels=size * directions), *weights, *biases)


def _positions(make: Maker) -> None:
    source = make.pick("seq")
    kind = make.kinds[source]
    lookup = make.random.choice((
        f"F.Embedding(F.contrib.arange_like({{0}}, axis=1), <0>, input_dim=200, output_dim={kind.channels})",
        "F.take(<0>, F.contrib.arange_like({0}, axis=1))"))
    make.add((source,), f"F.broadcast_add({{0}}, F.expand_dims({lookup}, axis=0))", kind,
             make.weight("e", (200, kind.channels)))


def along_sequence(make: Maker) -> None:
    source = make.pick("seq")
    kind = make.kinds[source]
    out = make.random.choice(CHANNELS)
    width, spread = make.random.choice(((1, 1), (3, 1), (3, 2)))
    pad = (width // 2) * spread
    make.bounded(make.add(
        (source,), f"F.swapaxes(F.Convolution(F.swapaxes({{0}}, 1, 2), <0>, kernel=({width},), pad=({pad},), "
        f"dilate=({spread},), num_filter={out}, no_bias=True), 1, 2)", kind._replace(channels=out),
        make.weight("w", (out, kind.channels, width))))


def depthwise(make: Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    width, spread = make.random.choice(((3, 1), (5, 1), (3, 2)))
    pad = (width // 2) * spread
    make.bounded(make.add(
        (source,), f"F.Convolution({{0}}, <0>, kernel=({width}, {width}), pad=({pad}, {pad}), dilate=({spread}, "
        f"{spread}), num_filter={kind.channels}, num_group={kind.channels}, no_bias=True)", kind,
        make.weight("w", (kind.channels, 1, width, width))))


def deconvolution(make: Maker) -> None:
    source = make.pick("map")
    kind = make.kinds[source]
    if kind.level:
        out = make.random.choice(CHANNELS)
        make.bounded(make.add(
            (source,), f"F.Deconvolution({{0}}, <0>, kernel=(2, 2), stride=(2, 2), num_filter={out}, no_bias=True)",
            Kind("map", out, kind.level - 1), make.weight("w", (kind.channels, out, 2, 2))))


def _product(make: Maker) -> None:
    source = make.pick(make.random.choice(("flat", "seq")))
    kind = make.kinds[source]
    out = make.random.choice(CHANNELS)
    shape = (out, kind.channels) if kind.name == "flat" else (kind.channels, out)
    text = ("F.dot({0}, <0>, transpose_b=True)" if kind.name == "flat" else
            f"F.linalg_gemm2(F.expand_dims({{0}}, axis=1), F.broadcast_like(F.reshape(<0>, {(1, 1, *shape)}), "
            "F.expand_dims({0}, axis=1), lhs_axes=(0,), rhs_axes=(0,)))")
    if kind.name == "seq":
        text = f"F.squeeze({text}, axis=1)"
    make.bounded(make.add((source,), text, kind._replace(channels=out), make.weight("w", shape)))


def _heads(make: Maker) -> None:
    """Add the attention of GluonNLP's fused layers."""
    source = make.pick("seq")
    kind = make.kinds[source]
    text = ("F.swapaxes(F.contrib.interleaved_matmul_selfatt_valatt((q := F.FullyConnected(F.swapaxes({0}, 0, 1), <0>, "
            f"num_hidden={3 * kind.channels}, flatten=False, no_bias=True)), F.softmax("
            "F.contrib.interleaved_matmul_selfatt_qk(q, heads=4), axis=-1), heads=4), 0, 1)")
    make.add((source,), text, kind, make.weight("w", (3 * kind.channels, kind.channels)))


def _group_norm(make: Maker) -> None:
    source = make.pick("map")
    channels = make.kinds[source].channels
    text = make.random.choice(("F.GroupNorm({0}, <0>, <1>, num_groups=4)", "F.InstanceNorm({0}, <0>, <1>)"))
    size = 4 if "Group" in text else channels
    make.add((source,), text, make.kinds[source], make.weight("gamma", (size,)), make.weight("beta", (size,)))


def sequence_batch_norm(make: Maker) -> None:
    source = make.pick(make.random.choice(("seq", "flat")))
    channels = make.kinds[source].channels
    fixed, axis = make.random.random() < 0.5, -1 if make.kinds[source].name == "seq" else 1
    make.add((source,), f"F.BatchNorm({{0}}, <0>, <1>, <2>, <3>, fix_gamma={fixed}, axis={axis})", make.kinds[source],
             # MXNet overwrites a gamma that is fixed: no other operator may read it.
             *(make.weight(role, (channels,)) for role in ("fixed" if fixed else "gamma", "beta", "mean", "var")))


def telltale(make: Maker, source: int) -> Step:
    """Make a step that is wrong where it does not run in FP32: nothing but noise is left behind its bias then."""
    kind = make.kinds[source]
    layer = ("F.Convolution({0}, <0>, <1>, kernel=(1, 1), num_filter=16)" if kind.name == "map" else
             "F.FullyConnected({0}, <0>, <1>, num_hidden=16, flatten=False)")
    shape = (16, kind.channels, 1, 1) if kind.name == "map" else (16, kind.channels)
    make.pool.append((f"big{len(make.pool)}", (16,)))
    make.add((source,), f"{layer} - 1024", kind._replace(channels=16), make.weight("w", shape),
             next(found for found in make.pool if found[0].startswith("big")))
    return make.steps[-1]


_RECTIFIERS = ("F.LeakyReLU({0}, act_type='leaky', slope=0.1)", "F.LeakyReLU({0}, act_type='elu', slope=0.5)",
               "F.LeakyReLU({0}, act_type='gelu')", "F.LeakyReLU({0}, act_type='selu')", "prelu(F, {0}, <0>, shape)")


def _rectifier(make: Maker) -> None:
    source = make.pick(make.random.choice(("map", "flat", "seq")))
    kind = make.kinds[source]
    if kind.level > 2:
        raise LookupError(kind)
    text = make.random.choice(_RECTIFIERS)
    slopes = [make.weight("alpha", (1 if kind.name == "seq" else kind.channels,))] if "<0>" in text else []
    make.add((source,), text.replace("shape", {"map": "(1, -1, 1, 1)", "seq": "(1, 1, 1)"}.get(kind.name, "(1, -1)")),
             kind, *slopes)


def dropout(make: Maker) -> None:
    source = make.pick(make.random.choice(("map", "flat", "seq")))
    make.add((source,), "F.Dropout({0}, p=0.5)", make.kinds[source])


def output_operator(make: Maker) -> None:
    """Add an operator that makes its own gradient, behind a dense layer and numbers that float16 cannot hold."""
    source = make.pick("map")
    kind = Kind("flat", make.kinds[source].channels)
    make.add((source,), "F.mean({0}, axis=(2, 3))", kind)
    weight = make.weight("w", (kind.channels, kind.channels))
    make.add((len(make.kinds) - 1,), f"F.FullyConnected({{0}}, <0>, num_hidden={kind.channels}, no_bias=True)", kind,
             weight)
    text = make.random.choice((
        "F.LinearRegressionOutput({0}, F.BlockGrad({0} * 0.5), grad_scale=30)",
        "F.LogisticRegressionOutput({0}, F.ones_like({0}), grad_scale=30)",
        "F.MAERegressionOutput({0}, F.BlockGrad({0} - 1), grad_scale=30)",
        "F.MakeLoss(F.square({0}), grad_scale=5)", "F.make_loss(F.square({0}) * 5)",
        "F.SoftmaxOutput({0}, F.argmax({0}, axis=1), grad_scale=30)"))
    make.add((len(make.kinds) - 1,), text.replace("{0}", "({0} * 1e6 * 1e-6)"), kind)


COMMON: list[Adds] = [
    convolution, convolution, convolution, dense, dense, to_flat, _to_sequence, _concat, _slice, pooling,
    _enlarged, along_sequence, depthwise, deconvolution, _product,
    binary("{0} + {1}", "F.elemwise_add({0}, {1})", "F.broadcast_add({0}, {1})"),
    binary("{0} - {1}", "F.broadcast_sub({0}, {1})"), binary("F.add_n({0}, {1})"),
    binary("F.where({0} > {1}, {0}, {1})", "F.squeeze(F.slice_axis(F.stack({0}, {1}, axis=0), axis=0, begin=1, "
           "end=2), axis=0)", "F.slice_like({0}, {1})",
           "F.reshape_like({0}, F.BlockGrad({1}))"),  # MXNet's executors do not write the latter's gradient
    unary("F.relu({0})", "F.Activation({0}, act_type='relu')", "F.clip({0}, a_min=0, a_max=6)"),
    unary("F.abs({0})", "-{0}", "F.identity({0})", "F.Dropout({0}, p=0.0)", "F.clip({0}, a_min=-2, a_max=2)",
          "F.BlockGrad(F.slice_axis({0}, axis=0, begin=0, end=None))", "F.flip({0}, axis=1)",
          "F.cast(F.cast({0}, dtype='float64') * 0.5, dtype='float32') * 2",
          "F.cast(F.cast({0}, dtype='float16') * 2, dtype='float32') * 0.5"),
    unary("F.depth_to_space(F.space_to_depth({0}, block_size=2), block_size=2)",
          "F.slice({0}, begin=(None, None, 1, 1), end=(None, None, None, None)).pad(mode='constant', "
          "pad_width=(0, 0, 0, 0, 1, 0, 1, 0))", "F.broadcast_sub({0}, F.max({0}, axis=1, keepdims=True))",
          "F.SwapAxis(F.SwapAxis({0}, dim1=1, dim2=2), dim1=1, dim2=2)", kinds=("map",), most_halved=1),
    unary("F.SequenceReverse({0})", "F.expand_dims({0}, axis=1).squeeze(axis=1)",
          "F.broadcast_add(F.sum(F.tile({0}, reps=(1, 1, 2)), axis=2, keepdims=True) * 0, {0})",
          "F.slice(F.repeat({0}, repeats=2, axis=1), begin=(None, 1, None), end=(None, None, None), "
          "step=(1, 2, 1))", kinds=("seq",))]
ON_INTEGERS: list[Adds] = [binary("F.maximum({0}, {1})")]
ON_FLOATS: list[Adds] = [
    batch_norm, batch_norm, norm, norm, _scaled, _excite, attention, attention, _recurrent, _recurrent,
    loop, _positions, _heads, _group_norm, sequence_batch_norm, binary("{0} * F.tanh({1})"),
    binary("F.elemwise_mul(F.sigmoid({0}), {1})", "{0} / (F.abs({1}) + 1)",
           "F.broadcast_hypot({0}, F.abs({1}) + 1) * 0.5"),
    unary(*(f"F.Activation({{0}}, act_type='{kind}')"
          for kind in ("sigmoid", "tanh", "softrelu", "softsign"))),
    _rectifier,
    unary("{0} * 0.5", "{0} + 0.5", "F.tanh({0})", "F.exp(-F.abs({0}))", "F.square(F.tanh({0}))",
          "F.sqrt(F.abs({0}) + 1)", "F.sigmoid({0})", "F.erf({0})", "F.log(F.abs({0}) + 1)",
          "F.log1p(F.abs({0}))",
          "F.smooth_l1({0}, scalar=1)", "F.arctan({0})", "F.rsqrt(F.square({0}) + 1)",
          "F.cbrt(F.abs({0}) + 1)",
          "F.hard_sigmoid({0})", "F.softsign({0})", "F.contrib.div_sqrt_dim({0})",
          "F.broadcast_div({0}, F.sum(F.abs({0}), axis=1, keepdims=True) + 1) * 4",
          "F.broadcast_sub({0}, F.mean({0}, axis=1, keepdims=True))",
          "F.broadcast_div({0}, F.norm(F.abs({0}) + 0.1, axis=1, keepdims=True) + 1) * 4"),
    unary("F.softmax({0}, axis=1)", "F.log_softmax({0}, axis=1) * 0.2", "F.softmin({0}, axis=1) * 4",
          kinds=("map", "flat")),
    unary("F.L2Normalization({0} + 1, mode='channel')", "F.LRN({0}, nsize=5)",
          "F.contrib.BilinearResize2D({0}, like=F.BlockGrad({0}), mode='like')",
          "F.broadcast_mul({0}, F.contrib.AdaptiveAvgPooling2D({0}, output_size=1))",
          "F.SoftmaxActivation({0}, mode='channel') * 4", kinds=("map",))]
