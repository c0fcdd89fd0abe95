"""Calls whose gradients are tried: the samples of operators, and others in which MXNet takes another path."""
from __future__ import annotations

from operator_samples import MXNET, fixed, low, sample

# In stock MXNet: what no program can run, or run backward, and so is not cured.
REFUSED = {
    "_sg_mkldnn_selfatt_qk": "made for inference: its backward pass ends the process",
    "_sg_mkldnn_selfatt_valatt": "made for inference: its backward pass ends the process",
    "_contrib_SparseEmbedding": "its gradient is a sparse array",
    "_contrib_ModulatedDeformableConvolution": "runs on GPUs only",
    "_contrib_count_sketch": "runs on GPUs only",
    "IdentityAttachKLSparseReg": "its gradient depends on what it was called with before",
    "Deconvolution": "its backward pass ends the process where another operator reads the weight, too",
    "Dropout": "it draws other numbers each time",
    "khatri_rao": "it asks for gradients of gradients",
    "_npi_copysign_scalar": "its backward pass is an error", "_npi_rcopysign_scalar": "its backward pass is an error"}
_MAP, _SMALL = low(2, 16, 12, 12), low(2, 16, 6, 8)
_STATISTICS = (fixed(16, values="zeros", aux=True), fixed(16, values="ones", aux=True))
_SLOPES = (((2, 16, 6, 8), (1,)), ((6, 16), (16,)), ((6, 16), (1,)), ((2, 16, 9), (16,)), ((2, 16, 3, 4, 5), (16,)),
           ((6, 16), (6, 16)), ((2, 16, 6, 8), (1, 16)), ((16,), (16,)), ((16,), (1,)), ((40, 16, 10, 10), (16,)))


def _resized():
    for size in ((12, 12), (12, 20), (1, 1), (24, 24)):
        yield sample("_contrib_BilinearResize2D", (_MAP, low(2, 16, *size)), mode="like", note=str(size))
    yield sample("_contrib_BilinearResize2D", (_MAP, low(2, 3, 12, 12)), mode="like", note="of 3 channels")
    yield sample("_contrib_BilinearResize2D", _MAP, height=12, width=12, note="of one size")
    yield sample("_contrib_AdaptiveAvgPooling2D", _MAP, output_size="(12, 12)")
    yield sample("UpSampling", (_MAP, low(2, 16, 6, 6)), scale=2, sample_type="nearest", num_args=2)
    yield sample("UpSampling", (_MAP, _MAP), scale=2, sample_type="nearest", num_args=2, multi_input_mode="sum")
    for size in (6, 12):
        yield sample("Crop", (_MAP, low(2, 16, size, size)), num_args=2, note=str(size))
    for op in ("slice_like", "broadcast_like", "reshape_like"):
        yield sample(op, (_SMALL, _SMALL), note="of one shape")
    yield sample("reshape_like", (low(2, 16, 48), _SMALL), lhs_begin=2, lhs_end=3, rhs_begin=2, rhs_end=4)


def _rectifiers():
    for data, slopes in _SLOPES:
        yield sample("LeakyReLU", (low(*data), low(*slopes)), act_type="prelu", note=f"{data} {slopes}")
    yield sample("LeakyReLU", _SMALL, act_type="leaky", slope=-0.5)
    for kind in ("leaky", "elu", "gelu"):
        yield sample("LeakyReLU", low(2, 3, 2, 3, 2, 2), act_type=kind, note="of six dimensions")


def _recurrent(mode, gates, layers, directions, **attrs):
    widths = [16, *[16 * directions] * (layers - 1)]
    count = sum(directions * gates * 16 * (width + 16 + 2) for width in widths)
    states = [low(layers * directions, 4, 16)] * (2 if mode == "lstm" else 1)
    return sample("RNN", (low(5, 4, 16), low(count, values="small"), *states), mode=mode, state_size=16,
                  num_layers=layers, bidirectional=directions == 2, note=f"{attrs}", **attrs)


def _norms():
    scales = fixed(16, values="positive"), fixed(16)
    for attrs in ({"fix_gamma": False, "output_mean_var": True}, {"fix_gamma": True, "use_global_stats": True}):
        yield sample("BatchNorm", (low(4, 16, 8, 8), *scales, *_STATISTICS), **attrs)
    yield sample("LayerNorm", (low(24, 16), *scales), output_mean_var=True)
    yield sample("LayerNorm", (low(4, 16, 8), *scales), axis=1)
    yield sample("GroupNorm", (low(4, 16, 8, 8), fixed(1, values="positive"), fixed(1)), num_groups=1)
    yield sample("L2Normalization", low(4, 6), mode="instance", note="a matrix")


def _indices():
    few = low(12, values="grid_index:40")
    yield sample("take", (low(40, 16), few), axis=0, note="index in low precision")
    yield sample("take", (low(4, 40, 16), few), axis=1, note="index in low precision")
    yield sample("pick", (low(24, 40), low(24, values="labels:40")), axis=1, note="index in low precision")
    yield sample("gather_nd", (low(24, 40), low(2, 16, values="labels:24")), note="index in low precision")
    yield sample("_contrib_boolean_mask", (low(24, 40), low(24, values="valid")), axis=0, note="low precision")
    for op in ("SequenceMask", "SequenceLast", "SequenceReverse"):
        yield sample(op, (low(10, 4, 16), low(4, values="length:10")), use_sequence_length=True, note="low precision")
    yield sample("SequenceLast", low(4, 10, 16), axis=1)
    yield sample("CTCLoss", (low(20, 4, 12), fixed(4, 5, values="length:11"), fixed(4, values="constant:20"),
                             fixed(4, values="constant:3")), use_data_lengths=True, use_label_lengths=True)


def _trivial():
    """Calls that change nothing, or nearly, which MXNet treats apart."""
    for op, attrs in (("Pad", {"mode": "constant", "pad_width": "(0, 0, 0, 0, 0, 0, 0, 0)"}),
                      ("slice", {"begin": "(None,)", "end": "(None,)"}), ("tile", {"reps": "(1,)"}),
                      ("repeat", {"repeats": 1}), ("broadcast_to", {"shape": "(2, 16, 6, 8)"}),
                      ("broadcast_axis", {"axis": "()", "size": "()"}), ("Concat", {"num_args": 1, "dim": 1}),
                      ("stack", {"num_args": 1, "axis": 0}), ("add_n", {"num_args": 1})):
        yield sample(op, (_SMALL,), note="nothing to do", **attrs)
    for op in ("sum", "mean", "max", "prod", "norm"):
        yield sample(op, low(6, 1), axis="1", note="one element")


def _products():
    yield sample("_np_dot", (low(24, 40), low(40)), note="a vector")
    yield sample("_np_dot", (low(3, 24, 40), low(40, 5)), note="a pile")
    yield sample("_npi_matmul", (low(24, 40), low(3, 40, 8)), note="one matrix")
    yield sample("_npi_tensordot", (low(4, 24, 40), low(40, 24, 3)), a_axes_summed="(2, 1)", b_axes_summed="(0, 1)")
    yield sample("_npi_tensordot_int_axes", (low(4, 24), low(4, 24)), axes=2, note="all axes")
    yield sample("_npi_einsum", (low(4, 24), low(4, 24)), num_args=2, subscripts="ij,ij->", note="all axes")
    yield sample("_npi_average", (low(64, 20), low(64, 20, values="positive")), axis="(0, 1)", note="all axes")
    yield sample("_npi_norm", low(20, 64), ord="2", axis="(1,)")
    yield sample("_linalg_gemm", (low(24, 40), low(40, 32), low(24, 32)), alpha=2.0, beta=0.5)
    yield sample("_linalg_trmm", (low(8, 8, values="lower"), low(8, 8)), rightside=True)
    yield sample("_linalg_trsm", (low(8, 8, values="lower"), low(8, 8)), rightside=True, transpose=True)
    yield sample("_contrib_DeformableConvolution", (_MAP, low(2, 18, 12, 12, values="small"),
                                                    low(16, 16, 3, 3, values="small")), kernel="(3, 3)", num_filter=16,
                 pad="(1, 1)", no_bias=True)


OTHERS = (*_resized(), *_rectifiers(), *_norms(), *_indices(), *_trivial(), *_products(),
          *(_recurrent(mode, gates, layers, directions, state_outputs=True)
            for mode, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1))
            for layers in (1, 2) for directions in (1, 2)), _recurrent("lstm", 4, 1, 1), _recurrent("gru", 3, 1, 1))
IN_INFERENCE = (
    *(sample("Pooling", low(2, 16, *size, values="distinct"), kernel="(2,)" if len(size) == 1 else "(2, 2)",
             stride="(2,)" if len(size) == 1 else "(2, 2)", note=str(size)) for size in ((12,), (12, 12))),
    sample("Pooling", low(2, 16, 4, 4, values="distinct"), kernel="(1, 1)", global_pool=True, pool_type="max"),
    sample("LeakyReLU", _SMALL, act_type="rrelu", lower_bound=0.2, upper_bound=0.6))
SAMPLES = (*(each for each in MXNET if each.in_graphs and each.gradient and each.op not in REFUSED
             and each.attrs.get("act_type") != "rrelu"), *OTHERS)
