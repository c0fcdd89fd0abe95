"""Pooling in C++, of maps that oneDNN has no fast kernels for: in plain rows without AVX512, or for a gradient."""
from __future__ import annotations

from typing import Mapping

from ..dtypes import AVX2_VALUES
from ..graph import Entry, Node, Readers, subgraphs_of
from ..graph.attrs import integers, is_channels_last, is_set
from ..rules.shapes import BLOCK, has_avx2_kernel, pools_out_of_order, pools_to_means
from .context import Context

_KEEP_LAYOUT = ("Activation", "relu", "clip", "LeakyReLU", "BatchNorm", "elemwise_add", "_copy")


def fits(node: Node, readers: Readers) -> bool:
    """Tell whether means of whole channels are taken, or means or maxima of windows that lie on a padded image."""
    attrs = node.attrs
    if is_set(attrs, "global_pool"):
        return pools_to_means(attrs)
    kernel, pads = integers(attrs, "kernel"), integers(attrs, "pad")
    return (attrs.get("pool_type", "max") in ("max", "avg") and attrs.get("pooling_convention", "valid") == "valid"
            and len(kernel) == 2 and len(node.inputs[0].shape or ()) == 4 and not is_channels_last(attrs)
            and all(pad < side for pad, side in zip(pads, kernel)) and readers.is_first_only(node))


def gains(node: Node, context: Context) -> bool:
    """Tell whether oneDNN has no kernel for the gradient, or takes values one by one.

    For the gradient in low precision there is a shape rule.
    """
    device, data = context.device, node.inputs[0]
    if is_set(node.attrs, "global_pool"):
        return (context.facts.recorded and not context.policy.lowers
                and pools_out_of_order(node.attrs, data.shape or (), device.amx, device.channel_multiple or BLOCK))
    return device.channel_multiple == AVX2_VALUES and context.int8 is None and _lies_in_rows(data)


def _lies_in_rows(data: Entry) -> bool:
    """Tell whether a map is in no layout of oneDNN's without AVX512, which has blocks of 8 channels."""
    if (data.shape or (0, 0))[1] % AVX2_VALUES:
        return True
    node = data.node
    while node.op in _KEEP_LAYOUT:
        node = node.inputs[0].node
    attrs = _convolution(node)
    return node.op == "transpose" or (
        attrs is not None and not has_avx2_kernel(attrs, node.inputs[0].shape, node.shapes[0]))


def _convolution(node: Node) -> Mapping[str, str] | None:
    """Return the attributes of a convolution, which may be one that oneDNN's fusion holds; None for other operators."""
    parts = subgraphs_of(node)[0].operators() if node.op == "_sg_mkldnn_conv" else [node]
    return next((each.attrs for each in parts if each.op == "Convolution"), None)
