"""Random steps with control flow: loops and branches, whose bodies are attributes of one operator in a graph."""
from __future__ import annotations

from fuzz_maker import Maker
from fuzz_programs import EXACT, Kind

__all__ = ["branch", "loop"]

Weights = list  # of names with shapes
# Not F.tanh and its like: MXNet cannot infer the storage of their gradients in loops over arrays.
_ACTIVATIONS = (*(f"F.Activation(@, act_type='{kind}')" for kind in ("tanh", "sigmoid", "relu", "softrelu")),
                "F.LeakyReLU(@, act_type='gelu')", "F.LeakyReLU(@, act_type='leaky', slope=0.1)")
_ON_INTEGERS = ("F.clip(@, a_min=0, a_max=3)", "F.clip(@, a_min=-2, a_max=2)")
_BATCHED = "F.squeeze({}, axis=0)", "F.expand_dims(@, axis=0)"


def _activation(make: Maker) -> str:
    return make.random.choice(_ON_INTEGERS if make.mode == EXACT else _ACTIVATIONS)


def _layer(make: Maker, kind: Kind) -> tuple[str, Weights, str]:
    """Return the call of a layer that keeps a kind, its weights, and the source of a Gluon layer, if it is one."""
    is_map, has_bias = kind.name == "map", make.random.random() < 0.5
    width = make.random.choice((1, 3))
    if make.random.random() < 0.3:
        return "<layer>(@)", [], (
            f"gluon.nn.Conv2D, {kind.channels}, {width}, padding={width // 2}, in_channels={kind.channels}, "
            f"use_bias={has_bias}" if is_map else
            f"gluon.nn.Dense, {kind.channels}, in_units={kind.channels}, flatten=False, use_bias={has_bias}")
    weight = make.weight("w", (kind.channels, kind.channels, width, width)[:4 if is_map else 2])
    bias = [make.weight("b", (kind.channels,))] if has_bias else []
    call = (f"F.Convolution(@, <0>{', <1>' * len(bias)}, kernel=({width}, {width}), pad=({width // 2}, {width // 2}), "
            f"num_filter={kind.channels}, " if is_map else
            f"F.FullyConnected(@, <0>{', <1>' * len(bias)}, num_hidden={kind.channels}, flatten=False, ")
    return f"{call}no_bias={not bias})", [weight, *bias], ""


def loop(make: Maker) -> None:
    """Add a loop: over the batch, along sequences as recurrent cells are written, or one that repeats a layer."""
    source = make.pick(make.random.choice(("map", "flat", "seq", "seq")))
    kind = make.kinds[source]
    layer, weights, made = _layer(make, kind)
    text = make.random.choice((_over_batch, _repeated, *[_along_sequence] * (kind.name == "seq")))(make, kind, layer)
    make.bounded(make.add((source,), text, kind, *weights, layer=made))


def _over_batch(make: Maker, kind: Kind, layer: str) -> str:
    one = layer if kind.name == "seq" else _BATCHED[0].format(layer.replace("@", _BATCHED[1]))
    body, state = (_activation(make).replace("@", each) for each in (one.replace("@", "one"), "one"))
    text = _with_state(f"lambda one, state: ({body} + state, {state})", "F.concat({0}, {0} * 0.5, dim=0)",
                       "F.sum({0}, axis=0) * 0")
    return f"F.slice_like({text}, {{0}}, axes=(0,))"  # MXNet fails where there is a single step


def _along_sequence(make: Maker, kind: Kind, layer: str) -> str:
    cell = _activation(make).replace("@", f"{layer.replace('@', 'one')} + state * 0.5" if make.mode != EXACT else
                                     f"{layer.replace('@', 'one')} - state")
    text = _with_state(f"lambda one, state: (lambda new: (new, new))({cell})", "F.swapaxes({0}, 0, 1)",
                       "F.sum({0}, axis=1) * 0")
    return f"F.swapaxes({text}, 0, 1)"


def _with_state(body: str, data: str, state: str) -> str:
    # Both results are read: MXNet fails where one has no gradient.
    return ("F.broadcast_add(*(lambda made: (made[0], F.expand_dims(made[1], axis=0)))"
            f"(F.contrib.foreach({body}, {data}, {state})))")


def _repeated(make: Maker, kind: Kind, layer: str) -> str:
    body = _activation(make).replace("@", layer.replace("@", "one"))
    return (f"F.contrib.while_loop(lambda i, one: i < 2, lambda i, one: (one, [i + 1, {body} + one]), "
            "[F.zeros(shape=(1,)), {0}], max_iterations=3)[1][1]")


def branch(make: Maker) -> None:
    """Add a branch; both read the same tensors: MXNet leaves the gradient of what only the other reads unwritten."""
    source = make.pick(make.random.choice(("map", "flat", "seq")))
    kind = make.kinds[source]
    layer, weights, made = _layer(make, kind)
    first, second = (_activation(make) for _ in range(2))
    sides = [first.replace("@", layer.replace("@", "{0}")), layer.replace("@", second.replace("@", "{0}"))]
    make.random.shuffle(sides)
    bound = make.random.choice((-10 ** 4, 10 ** 4))  # which side is taken does not depend on rounding
    make.bounded(make.add((source,), f"F.contrib.cond(F.max({{0}}) > {bound}, lambda: {sides[0]}, lambda: {sides[1]})",
                          kind, *weights, layer=made))
