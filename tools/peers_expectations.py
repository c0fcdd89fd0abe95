"""Which of MXNet's test files tools/peers.py runs, and what may differ in them, with reasons. Data only."""
from __future__ import annotations

# A file of tests/python, and pytest's expressions for the tests of it that AMP can affect: a process for each.
ALL = ("",)
FILES = {
    "mkl/test_contrib_amp.py": ALL,
    "mkl/test_subgraph.py": ALL,
    "mkl/test_mkldnn.py": ALL,
    "mkl/test_bf16_operator.py": ALL,
    "quantization/test_quantization.py": ALL,
    "unittest/test_autograd.py": ALL,
    "unittest/test_higher_order_grad.py": ALL,
    "unittest/test_sparse_operator.py": ALL,
    "unittest/test_optimizer.py": ALL,
    "unittest/test_gluon_estimator.py": ALL,
    "unittest/test_gluon_contrib.py": ALL,
    "unittest/test_numpy_op.py": ALL,
    "unittest/test_loss.py": ALL,
    "unittest/test_gluon_trainer.py": ALL,
    "unittest/test_symbol.py": ALL,
    "unittest/test_subgraph_op.py": ALL,
    "unittest/test_module.py": ALL,
    "unittest/test_numpy_gluon.py": ALL,
    "unittest/test_gluon_rnn.py": ALL,
    "unittest/test_contrib_control_flow.py": ALL,
    "unittest/test_gluon.py": ("not pooling2d and not test_reshape_conv and not test_slice_conv",),  # minutes each
    "unittest/test_operator.py": (
        "amp or fully or convolution or pool or norm or embedding or activation or lu or sigmoid or softsign",
        "dot or gemm or softmax or softmin or attention or sequence or regression or vector_machine or ctc or custom",
        "concat or stack or slice or split or reshape or transpose or swapaxes or axis or squeeze or dims or crop "
        "or pad or flip or tile or repeat or clip or cast or where or take or pick or one_hot or upsampling or resize",
        "reduce or broadcast or sum or add_n or moments or mean or maximum or abs or scalar or binary_op or unary "
        "or pow or sqrt or monitor or blockgrad or div or mathematical or finite",
        "dropout or float64",
    ),
}

# Tests of these files that are left out, and why.
_LONG = "more than 45 seconds in stock MXNet alone, on a busy machine"
TOO_SLOW = {("unittest/test_operator.py", name): _LONG for name in (
    "test_batchnorm", "test_big_transpose", "test_broadcast_binary_op", "test_layer_norm",
    "test_psroipooling", "test_rnnrelu_bidirectional")}

# Statements of tests that expect what this package does otherwise by intent: file, a text in the statement, and why.
LEFT_OUT = {
    ("mkl/test_contrib_amp.py", 'fp32_ops=["elemwise_add"]'):
        "fp32_ops adds to the tables, so that an operator may be named that MXNet has in another list",
    ("mkl/test_contrib_amp.py", 'assert mod._arg_params["stage2_unit1_conv2_weight"].dtype == np.float32'):
        "convert_model stores parameters in low precision unless it is told not to",
    ("mkl/test_contrib_amp.py", 'assert params["stage2_unit1_conv2_weight"].dtype == np.float32'):
        "as before: convert_hybrid_block, too",
    ("mkl/test_contrib_amp.py", 'assert arg_params["fullyconnected_weight"].dtype == bfloat16'):
        "an operator that the given target_dtype_ops leave out runs in FP32, whatever its data comes in",
    # The next two are variables that the test types float32 and expects in bfloat16.
    ("mkl/test_contrib_amp.py", "simple_bind(ctx=mx.cpu(), data2=(1, 2), data=(1, 2))"):
        "amp_multicast computes in the widest type of its inputs: casting the FP32 one would change the results",
    ("mkl/test_contrib_amp.py", "final_res = amp.convert_symbol(out8"):
        "as before: amp_multicast reads the variable in FP32",
}

# Tests that fail with AMP only, by file and name, and why they may.
EXPLAINED: dict[tuple[str, str], str] = {
    ("unittest/test_numpy_op.py", "test_np_diff"):
        "MXNet does not write the gradient of an empty result: stock leaves what the array held, zeros in this test",
}

# The same, in low precision only.
_DEEP = ("four recurrent layers with weights of deviation 1 are ill-conditioned: in stock FP32, weights moved by a "
         "rounding to bfloat16 change gradients by up to 65 % (GRU)")
ROUNDED = {("unittest/test_gluon_rnn.py", name): _DEEP for name in ("test_fused_lstm_layer", "test_fused_gru_layer")}
ROUNDED["unittest/test_operator.py", "test_fully_connected"] = (
    "its reference are differences of outputs at a distance of 1e-4, which outputs in bfloat16 do not resolve")
ROUNDED["unittest/test_operator.py", "test_op_all_names_monitor"] = (
    "casts read the variables before the operator does: a monitor is told the same names in another order")
ROUNDED["unittest/test_gluon.py", "test_inline"] = (
    "it counts recorded operators: with its casts the network has more than inline_limit, and is recorded as one")
ROUNDED["unittest/test_gluon.py", "test_hybrid_static_memory"] = (
    "batch norms over two samples of one pixel are ill-conditioned: in stock FP32, weights moved by 2^-9 change the "
    "output by half and gradients by all of their length")
ROUNDED["unittest/test_symbol.py", "test_eliminate_common_expr"] = (
    "it counts the nodes of graphs: where float16 is imitated, each tensor is rounded by nodes of its own")
ROUNDED["unittest/test_module.py", "test_module_dtype"] = (
    "the outputs of two devices are joined outside of graphs, where imitated float16 gives FP32 arrays")

# Tests that pass stock with NumPy 1 and not with NumPy 2, and why they may.
NUMPY_2 = {
    ("unittest/test_metric.py", "test_acc"):
        "the test divides a float32 number by a Python one, which is float64 with NumPy 1 and float32 with NumPy 2",
    ("unittest/test_numpy_ndarray.py", "test_np_ndarray_indexing"):
        "the test sets an element of NumPy's to an array of one value, which NumPy 2.5 refuses",
    ("unittest/test_numpy_interoperability.py", "test_np_array_function_protocol"):
        "the test puts 1621 into an int8 array, which NumPy 2 refuses",
}
