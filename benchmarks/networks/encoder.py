"""A transformer encoder of BERT's shape, from Gluon blocks; no dropout, so that runs can be compared."""

from __future__ import annotations

from typing import Any

from mxnet.gluon import HybridBlock, nn

_MASKED = 1e4  # subtracted from the scores of masked tokens: exp() of it is 0 in any precision


class SelfAttention(HybridBlock):
    """Attention of several heads within a sequence.

    Parameters
    ----------
    units, heads : int
        Width of the sequence's vectors, and into how many heads it is divided.
    """

    def __init__(self, units: int, heads: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.heads, self.scale = heads, (units // heads) ** -0.5
        with self.name_scope():
            self.queries_keys_values = nn.Dense(3 * units, flatten=False, in_units=units)
            self.out = nn.Dense(units, flatten=False, in_units=units)

    def hybrid_forward(self, F: Any, x: Any, bias: Any = None) -> Any:
        """Attend; `x` is ``(batch, length, units)``, `bias` what to add to scores, ``(batch, 1, length)``."""
        split = F.split(self.queries_keys_values(x), num_outputs=3, axis=2)
        queries, keys, values = (self._by_head(F, each) for each in split)
        scores = F.batch_dot(queries * self.scale, keys, transpose_b=True)
        if bias is not None:
            scores = F.broadcast_add(scores, F.repeat(bias, repeats=self.heads, axis=0))
        mixed = F.batch_dot(F.softmax(scores, axis=-1), values)
        mixed = F.reshape(mixed, (-1, self.heads, 0, 0), reverse=True)
        return self.out(F.reshape(F.transpose(mixed, (0, 2, 1, 3)), (0, 0, -1)))

    def _by_head(self, F: Any, x: Any) -> Any:
        heads = F.transpose(F.reshape(x, (0, 0, self.heads, -1)), (0, 2, 1, 3))
        return F.reshape(heads, (-1, 0, 0), reverse=True)


class EncoderLayer(HybridBlock):
    """Attention and a feed-forward network, each added to its input and normalised."""

    def __init__(self, units: int, heads: int, hidden: int, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.attention = SelfAttention(units, heads)
            self.widen = nn.Dense(hidden, flatten=False, in_units=units)
            self.narrow = nn.Dense(units, flatten=False, in_units=hidden)
            self.norm1, self.norm2 = nn.LayerNorm(in_channels=units), nn.LayerNorm(in_channels=units)

    def hybrid_forward(self, F: Any, x: Any, bias: Any = None) -> Any:
        """Return the layer's output, of the shape of `x`."""
        x = self.norm1(x + (self.attention(x) if bias is None else self.attention(x, bias)))
        return self.norm2(x + self.narrow(F.LeakyReLU(self.widen(x), act_type="gelu")))


class Encoder(HybridBlock):
    """Embeddings, encoder layers, and a classifier on the first token.

    Parameters
    ----------
    layers, units, heads, hidden : int
        Number of layers, width, attention heads, and width of the feed-forward network.
    length, vocabulary, classes : int
        Tokens in a sequence, different tokens, and classes.
    masked : bool
        Whether there is a third input, a mask with 1 for the tokens that count.

    Examples
    --------
    >>> import mxnet as mx
    >>> net = Encoder(layers=1, units=8, heads=2, hidden=16, length=4, vocabulary=10, classes=2)
    >>> net.initialize()
    >>> net(mx.nd.zeros((3, 4), dtype="int32"), mx.nd.zeros((3, 4), dtype="int32")).shape
    (3, 2)
    """

    def __init__(self, layers: int, units: int, heads: int, hidden: int, length: int, vocabulary: int,
                 classes: int, masked: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.masked = masked
        with self.name_scope():
            self.words = nn.Embedding(vocabulary, units)
            self.segments = nn.Embedding(2, units)
            self.positions = self.params.get("positions", shape=(1, length, units))
            self.norm = nn.LayerNorm(in_channels=units)
            self.layers = nn.HybridSequential()
            for _ in range(layers):
                self.layers.add(EncoderLayer(units, heads, hidden))
            self.pooler = nn.Dense(units, activation="tanh", in_units=units)
            self.classifier = nn.Dense(classes, in_units=units)

    def hybrid_forward(self, F: Any, tokens: Any, segments: Any, *mask: Any, positions: Any = None) -> Any:
        """Return a score for each class, ``(batch, classes)``; the inputs are ``(batch, length)``."""
        x = self.norm(F.broadcast_add(self.words(tokens) + self.segments(segments), positions))
        bias = [F.expand_dims((each - 1) * _MASKED, axis=1) for each in mask]
        for layer in self.layers:
            x = layer(x, *bias)
        first = F.squeeze(F.slice_axis(x, axis=1, begin=0, end=1), axis=1)
        return self.classifier(self.pooler(first))
