"""Groups of operators that tables treat alike: tuples of registered names.

No operator is in two groups, and one that is alone in its row is in none. Operators that compute gradients are left
out: they run as their forward operators do, and no program calls them.
"""
from __future__ import annotations

# Layers: convolutions, normalisation, activations, losses, detection.

ATTENTION = (  # batched products of attention layers whose queries, keys and values share one tensor
    "_contrib_interleaved_matmul_selfatt_qk", "_contrib_interleaved_matmul_selfatt_valatt",
    "_contrib_interleaved_matmul_encdec_qk", "_contrib_interleaved_matmul_encdec_valatt",
)
ONEDNN_SUBGRAPHS = (  # what optimize_for('MKLDNN') fuses layers into; on the CPU only
    "_sg_mkldnn_conv", "_sg_mkldnn_fully_connected", "_sg_mkldnn_selfatt_qk", "_sg_mkldnn_selfatt_valatt",
)
BATCH_NORMS = ("BatchNorm", "_contrib_BatchNormWithReLU")  # inputs: data, gamma, beta, moving mean, moving variance
NORMS = ("LayerNorm", "GroupNorm", "InstanceNorm", "L2Normalization")  # normalisation by statistics of the data itself
RELU = ("relu", "_npx_relu")  # rectifiers
PIECEWISE_SIGMOIDS = ("hard_sigmoid", "softsign")  # bounded activation functions without exponentials
RESIZING = ("UpSampling", "_contrib_BilinearResize2D")  # resizing of feature maps
OLD_LAYERS = ("Convolution_v1", "Pooling_v1", "BatchNorm_v1")  # superseded forms of layers, kept for old models
SOFTMAX = ("softmax", "log_softmax")  # softmax along an axis
LOSS_OUTPUTS = (  # output layers whose backward is a loss's gradient times their attribute `grad_scale`
    "SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput", "MakeLoss",
)
LOSSES = (  # further forms of softmax, losses, and output layers without `grad_scale`
    "softmin", "SoftmaxActivation", "softmax_cross_entropy", "SVMOutput", "make_loss", "CTCLoss", "smooth_l1",
    "IdentityAttachKLSparseReg",
)
EMBEDDINGS = ("Embedding", "_contrib_SparseEmbedding")  # inputs: indices, weight
SEQUENCES = ("SequenceLast", "SequenceMask", "SequenceReverse")  # inputs: data, lengths of its sequences
BOXES = (  # anchors, boxes, scores and their matching; pooling over regions given by coordinates
    "_contrib_MultiBoxPrior", "_contrib_MultiBoxTarget", "_contrib_MultiBoxDetection", "_contrib_box_nms",
    "_contrib_box_iou", "_contrib_box_encode", "_contrib_box_decode", "_contrib_bipartite_matching",
    "_contrib_Proposal", "_contrib_MultiProposal", "ROIPooling", "_contrib_ROIAlign", "_contrib_RROIAlign",
    "_contrib_PSROIPooling", "_contrib_DeformablePSROIPooling",
)
GRIDS = (  # sampling at coordinates, convolutions at learned offsets, and comparison of displaced patches
    "BilinearSampler", "GridGenerator", "SpatialTransformer", "Correlation", "_contrib_DeformableConvolution",
    "_contrib_ModulatedDeformableConvolution",
)

# Arithmetic: elementwise functions, reductions, matrix products, linear algebra.

PLAIN_PRODUCTS = ("dot", "_np_dot", "_npi_tensordot", "_npi_tensordot_int_axes")  # products of two matrices
BATCHED_PRODUCTS = ("batch_dot", "_npi_matmul")  # products of two stacks of matrices
LINEAR_ALGEBRA = (  # products of this package, factorisations, inverses and what goes with them
    "_linalg_gemm", "_linalg_gemm2", "khatri_rao", "_linalg_potrf", "_linalg_potri", "_linalg_trmm", "_linalg_trsm",
    "_linalg_syrk", "_linalg_gelqf", "_linalg_syevd", "_linalg_sumlogdiag", "_linalg_extractdiag",
    "_linalg_makediag", "_linalg_extracttrian", "_linalg_maketrian", "_linalg_inverse", "_linalg_det",
    "_linalg_slogdet", "_npi_cholesky", "_npi_eig", "_npi_eigh", "_npi_eigvals", "_npi_eigvalsh", "_npi_svd",
    "_npi_solve", "_npi_pinv", "_npi_pinv_scalar_rcond", "_npi_tensorinv", "_npi_tensorsolve",
)
SELECTS = (  # signs, the larger or smaller of values, yes or no: exact in any precision
    "abs", "_npi_absolute", "negative", "_npi_negative", "sign", "_npi_sign", "_contrib_sign_ste", "_maximum_scalar",
    "_minimum_scalar", "max", "min", "_np_max", "_np_min", "logical_not", "_npi_logical_not", "_npi_isnan",
    "_npi_isinf", "_npi_isfinite", "_npi_isneginf", "_npi_isposinf", "_np_all", "_np_any",
)
ROUNDING = (  # rounding to whole numbers
    "ceil", "_npi_ceil", "floor", "_npi_floor", "rint", "_npi_rint", "round", "trunc", "_npi_trunc", "fix", "_npi_fix",
    "_contrib_round_ste",
)
BOUNDED = (  # functions whose values and slopes stay small
    "sigmoid", "_npx_sigmoid", "tanh", "_npi_tanh", "sin", "_npi_sin", "cos", "_npi_cos", "arctan", "_npi_arctan",
    "arcsinh", "_npi_arcsinh", "erf",
)
EXPONENTIALS = (  # exponentials, logarithms, powers, roots, quotients: results leave float16's range easily
    "exp", "_npi_exp", "expm1", "_npi_expm1", "log", "_npi_log", "log1p", "_npi_log1p", "log2", "_npi_log2",
    "log10", "_npi_log10", "cosh", "_npi_cosh", "sinh", "_npi_sinh", "gamma", "gammaln", "_npi_ldexp",
    "_npi_ldexp_scalar", "_npi_rldexp_scalar", "square", "_npi_square", "sqrt", "_npi_sqrt", "rsqrt", "cbrt",
    "_npi_cbrt", "rcbrt", "reciprocal", "_npi_reciprocal", "_power", "_power_scalar", "_rpower_scalar",
    "broadcast_power", "_npi_power", "_npi_power_scalar", "_npi_rpower_scalar", "_hypot", "_hypot_scalar",
    "broadcast_hypot", "_contrib_quadratic", "elemwise_div", "broadcast_div", "_rdiv_scalar",
)
STEEP = (  # functions with poles or infinite slopes, and angles
    "tan", "_npi_tan", "arcsin", "_npi_arcsin", "arccos", "_npi_arccos", "arctanh", "_npi_arctanh", "arccosh",
    "_npi_arccosh", "erfinv", "degrees", "_npi_degrees", "radians", "_npi_radians", "_npi_arctan2_scalar",
    "_npi_rarctan2_scalar",
)
NUMPY_DIVISIONS = ("_npi_true_divide", "_npi_rtrue_divide_scalar")  # of tensors, and of a scalar by one, NumPy's way
REMAINDERS = (  # remainders
    "_mod", "broadcast_mod", "_npi_mod", "_mod_scalar", "_rmod_scalar", "_npi_mod_scalar", "_npi_rmod_scalar",
)
SCALAR_ARITHMETIC = (  # arithmetic with one scalar
    "_plus_scalar", "_minus_scalar", "_rminus_scalar", "_mul_scalar", "_div_scalar", "_npi_add_scalar",
    "_npi_subtract_scalar", "_npi_rsubtract_scalar", "_npi_multiply_scalar", "_contrib_div_sqrt_dim",
)
SCALAR_COPYSIGN = ("_npi_copysign_scalar", "_npi_rcopysign_scalar")  # signs copied between tensor and scalar
SCALAR_COMPARISONS = (  # comparisons and logic with one scalar
    "_equal_scalar", "_not_equal_scalar", "_greater_scalar", "_greater_equal_scalar", "_lesser_scalar",
    "_lesser_equal_scalar", "_logical_and_scalar", "_logical_or_scalar", "_logical_xor_scalar", "_npi_equal_scalar",
    "_npi_not_equal_scalar", "_npi_greater_scalar", "_npi_greater_equal_scalar", "_npi_less_scalar",
    "_npi_less_equal_scalar",
)
ELEMWISE_ADDITIONS = ("elemwise_add", "add_n")  # sums of tensors of one shape
ADDITIONS = (  # sums, differences and products of tensors
    "elemwise_sub", "elemwise_mul", "broadcast_add", "broadcast_sub", "broadcast_mul", "_npi_add", "_npi_subtract",
    "_npi_multiply",
)
SELECTION = ("_maximum", "_minimum", "broadcast_maximum", "broadcast_minimum", "_npi_copysign")  # of two tensors
COMPARISONS = (  # comparisons and logic of two tensors
    "_equal", "_not_equal", "_greater", "_greater_equal", "_lesser", "_lesser_equal", "_logical_and", "_logical_or",
    "_logical_xor", "broadcast_equal", "broadcast_not_equal", "broadcast_greater", "broadcast_greater_equal",
    "broadcast_lesser", "broadcast_lesser_equal", "broadcast_logical_and", "broadcast_logical_or",
    "broadcast_logical_xor", "_npi_equal", "_npi_not_equal", "_npi_greater", "_npi_greater_equal", "_npi_less",
    "_npi_less_equal",
)
INTEGER_ARITHMETIC = (  # for integers only
    "_npi_bitwise_and", "_npi_bitwise_and_scalar", "_npi_bitwise_not", "_npi_bitwise_or", "_npi_bitwise_or_scalar",
    "_npi_bitwise_xor", "_npi_bitwise_xor_scalar", "_npi_lcm", "_npi_lcm_scalar",
)
SUMS = ("sum", "mean")  # sums and means
NUMPY_SUMS = ("_np_sum", "_npi_mean")  # sums and means, NumPy's way
NORMS_OF_TENSORS = ("norm", "_npi_norm")  # norms
OTHER_REDUCTIONS = (  # products, moments, and other statistics over an axis
    "nansum", "nanprod", "prod", "_np_prod", "moments", "_npi_std", "_npi_var", "_npi_average", "_np_trace",
    "_square_sum", "_npi_percentile", "_npi_polyval", "_npi_diff", "_npi_ediff1d",
)
TRANSFORMS = ("_contrib_fft", "_contrib_ifft", "_contrib_count_sketch", "_contrib_hawkesll")  # and likelihoods
SPARSE_ARITHMETIC = ("_scatter_elemwise_div", "_scatter_plus_scalar", "_scatter_minus_scalar")  # on stored values

# Data movement: shapes, joins, slices, indexing, ordering.

IDENTITIES = ("_copy", "_np_copy", "BlockGrad", "_contrib_gradientmultiplier")  # copies that autograd sees
RESHAPES = (  # new shapes for the same elements in the same order
    "Reshape", "_np_reshape", "_npx_reshape", "expand_dims", "_np_atleast_1d", "_np_atleast_2d", "_np_atleast_3d",
)
FLATTENING = ("Flatten", "squeeze", "_np_squeeze")  # axes merged or dropped
MOVED_AXES = ("_np_transpose", "_np_moveaxis", "_npi_rot90", "_np_roll")  # axes in another order, elements rolled
MOVES = ("slice_axis", "SwapAxis", "reverse", "_npi_flip", "depth_to_space", "space_to_depth")  # slices, other orders
SPLITS = ("SliceChannel", "_split_v2", "_npi_hsplit", "_npi_dsplit")  # one tensor to several
REPETITIONS = ("tile", "repeat", "broadcast_to", "broadcast_axis")  # elements repeated; the gradient is a sum
DIAGONALS = ("diag", "_np_diag", "_np_diagflat", "_np_diagonal", "_npi_tril")  # diagonals and triangles
PATCHES = ("im2col", "col2im")  # sliding windows to columns and back
JOINS = (  # tensors joined along an axis
    "Concat", "stack", "_npi_concatenate", "_npi_stack", "_npi_vstack", "_npi_hstack", "_npi_dstack",
    "_npi_column_stack",
)
NUMPY_WHERE_SCALAR = ("_npi_where_lscalar", "_npi_where_rscalar")  # inputs: condition and one tensor
GATHERS = ("gather_nd", "batch_take", "_contrib_boolean_mask")  # inputs: data, indices or mask
SCATTERS = ("scatter_nd", "_contrib_index_copy")  # inputs: data, indices; or old, index, new
# Where operators read positions: the numbers of the inputs.
POSITIONS = {
    **dict.fromkeys(("Embedding", "_contrib_SparseEmbedding", "one_hot", "_ravel_multi_index", "_unravel_index"), 0),
    **dict.fromkeys(("take", "pick", "gather_nd", "batch_take", *SCATTERS, "SequenceMask", "SequenceLast",
                     "SequenceReverse"), 1)}
# Elements inserted, deleted, or made unique.
INSERTIONS = ("_npi_delete", "_npi_insert_scalar", "_npi_insert_slice", "_npi_insert_tensor", "_npi_unique")
SORTING = ("sort", "argsort", "topk")  # sorting
COUNTS = (  # positions of extremes, and indices made from indices
    "argmax", "argmin", "argmax_channel", "_npi_argmax", "_npi_argmin", "one_hot", "_ravel_multi_index",
    "_unravel_index", "_contrib_arange_like",
)
FILLED_LIKE = ("zeros_like", "ones_like")  # constants in the shape and type of the input
SHAPES = (  # integers that depend on shapes, or on which elements are zero
    "shape_array", "size_array", "_contrib_index_array", "_npi_diag_indices_from", "_npx_nonzero", "_npi_share_memory",
)

# Everything else: creation, random numbers, images, integers, optimizers, and MXNet's own machinery.

CASTS = ("Cast", "amp_cast", "amp_multicast")  # data types chosen by the program
CREATION = (  # tensors from nothing
    "_arange", "_eye", "_full", "_linspace", "_ones", "_zeros", "_zeros_without_dtype", "_set_value", "_npi_arange",
    "_npi_blackman", "_npi_eye", "_npi_hamming", "_npi_hanning", "_npi_identity", "_npi_indices", "_npi_logspace",
    "_npi_ones", "_npi_zeros", "_npi_where_scalar2",
)
RANDOM = (  # samples; the parameters are attributes
    "_random_exponential", "_random_gamma", "_random_generalized_negative_binomial", "_random_negative_binomial",
    "_random_normal", "_random_poisson", "_random_randint", "_random_uniform", "_sample_unique_zipfian",
)
SAMPLES = (  # samples whose parameters or shapes come from tensors, and probability densities
    "_random_exponential_like", "_random_gamma_like", "_random_generalized_negative_binomial_like",
    "_random_negative_binomial_like", "_random_normal_like", "_random_poisson_like", "_random_uniform_like",
    "_sample_exponential", "_sample_gamma", "_sample_generalized_negative_binomial", "_sample_multinomial",
    "_sample_negative_binomial", "_sample_normal", "_sample_poisson", "_sample_uniform", "_npi_bernoulli",
    "_npi_choice", "_npi_exponential", "_npi_gamma", "_npi_gumbel", "_npi_logistic", "_npi_multinomial",
    "_npi_normal", "_npi_normal_n", "_npi_pareto", "_npi_powerd", "_npi_rayleigh", "_npi_uniform", "_npi_uniform_n",
    "_npi_weibull", "_random_pdf_dirichlet", "_random_pdf_exponential", "_random_pdf_gamma",
    "_random_pdf_generalized_negative_binomial", "_random_pdf_negative_binomial", "_random_pdf_normal",
    "_random_pdf_poisson", "_random_pdf_uniform",
)
IMAGES = (  # image decoding and augmentation
    "_cvcopyMakeBorder", "_cvimdecode", "_cvimread", "_cvimresize", "_imdecode", "_image_adjust_lighting",
    "_image_crop", "_image_flip_left_right", "_image_flip_top_bottom", "_image_normalize", "_image_random_brightness",
    "_image_random_color_jitter", "_image_random_contrast", "_image_random_flip_left_right",
    "_image_random_flip_top_bottom", "_image_random_hue", "_image_random_lighting", "_image_random_saturation",
    "_image_resize", "_image_to_tensor",
)
QUANTIZED = (  # eight-bit arithmetic, its ranges and its conversions
    "_contrib_calibrate_entropy", "_contrib_dequantize", "_contrib_quantize", "_contrib_quantize_asym",
    "_contrib_quantize_v2", "_contrib_quantized_act", "_contrib_quantized_batch_norm", "_contrib_quantized_concat",
    "_contrib_quantized_conv", "_contrib_quantized_elemwise_add", "_contrib_quantized_elemwise_mul",
    "_contrib_quantized_embedding", "_contrib_quantized_flatten", "_contrib_quantized_fully_connected",
    "_contrib_quantized_pooling", "_contrib_quantized_rnn", "_contrib_requantize",
)
OPTIMIZERS = (  # weight updates in place, some with FP32 masters beside low-precision weights
    "_adamw_update", "_mp_adamw_update", "_multi_adamw_update", "_multi_lamb_update", "_multi_mp_adamw_update",
    "_multi_mp_lamb_update", "_contrib_group_adagrad_update", "_sparse_adagrad_update", "adam_update", "ftml_update",
    "ftrl_update", "lamb_update_phase1", "lamb_update_phase2", "mp_lamb_update_phase1", "mp_lamb_update_phase2",
    "mp_nag_mom_update", "mp_sgd_mom_update", "mp_sgd_update", "multi_lars", "multi_mp_sgd_mom_update",
    "multi_mp_sgd_update", "multi_sgd_mom_update", "multi_sgd_update", "nag_mom_update",
    "preloaded_multi_mp_sgd_mom_update", "preloaded_multi_mp_sgd_update", "preloaded_multi_sgd_mom_update",
    "preloaded_multi_sgd_update", "rmsprop_update", "rmspropalex_update", "sgd_mom_update", "sgd_update",
    "signsgd_update", "signum_update", "reset_arrays",
)
GRADIENT_CHECKS = ("all_finite", "multi_all_finite", "multi_sum_sq")  # whether all are finite, and their norm
IN_PLACE = (  # writes into a part of a tensor, and copies between arrays
    "_copyto", "_slice_assign", "_slice_assign_scalar", "_scatter_set_nd", "_npi_boolean_mask_assign_scalar",
    "_npi_boolean_mask_assign_tensor", "_onehot_encode", "fill_element_0index",
)
SPARSE_STORAGE = (  # storage of sparse tensors, and graphs stored as such
    "cast_storage", "_sparse_retain", "_contrib_getnnz", "_contrib_edge_id", "_contrib_dgl_adjacency",
    "_contrib_dgl_csr_neighbor_non_uniform_sample", "_contrib_dgl_csr_neighbor_uniform_sample",
    "_contrib_dgl_graph_compact", "_contrib_dgl_subgraph",
)
CONTROL_FLOW = ("_foreach", "_while_loop", "_cond")  # loops and branches over subgraphs
USER_CODE = ("Custom", "_CustomFunction", "_Native", "_NDArray")  # operators written in Python
MACHINERY = (  # operators that MXNet inserts itself
    "_CachedOp", "_CachedOpThreadSafe", "_CrossDeviceCopy", "_NoGradient", "_identity_with_attr_like_rhs",
    "_npx_constraint_check",
)

# Operators whose gradient does not follow from the one that comes back, for their first input: output layers with a
# loss in them. SoftmaxOutput does so with ``out_grad=True``, too: MXNet multiplies by its output then.
IGNORE_GRADIENT = frozenset((*LOSS_OUTPUTS, "SVMOutput", "make_loss"))
ADDS_GRADIENT = "IdentityAttachKLSparseReg"  # passes the gradient that comes back on, and adds one of its own
WITH_OWN_GRADIENT = frozenset((*IGNORE_GRADIENT, ADDS_GRADIENT))
CUSTOM = "Custom"  # the user's own, which says for itself whether it reads the gradient that comes back

# Operators that decide by order, and which among equal values is anybody's choice.
CHOOSE_BY_ORDER = frozenset({
    "topk", "sort", "argsort", "argmax", "argmax_channel", "argmin", "_npi_argmax", "_npi_argmin", "_contrib_box_nms",
    "_contrib_bipartite_matching", "_contrib_Proposal", "_contrib_MultiBoxDetection"})
