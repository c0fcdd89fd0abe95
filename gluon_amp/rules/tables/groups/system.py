"""Everything else: creation, random numbers, images, integers, optimizers, and MXNet's own machinery."""
from __future__ import annotations

# Data types chosen by the program.
CASTS = ("Cast", "amp_cast", "amp_multicast")
# Tensors from nothing.
CREATION = (
    "_arange", "_eye", "_full", "_linspace", "_ones", "_zeros", "_zeros_without_dtype", "_set_value",
    "_npi_arange", "_npi_blackman", "_npi_eye", "_npi_hamming", "_npi_hanning", "_npi_identity",
    "_npi_indices", "_npi_logspace", "_npi_ones", "_npi_zeros", "_npi_where_scalar2",
)
# Samples; the parameters are attributes.
RANDOM = (
    "_random_exponential", "_random_gamma", "_random_generalized_negative_binomial",
    "_random_negative_binomial", "_random_normal", "_random_poisson", "_random_randint", "_random_uniform",
    "_sample_unique_zipfian",
)
# Samples; parameters or shapes come from tensors.
SAMPLES = (
    "_random_exponential_like", "_random_gamma_like", "_random_generalized_negative_binomial_like",
    "_random_negative_binomial_like", "_random_normal_like", "_random_poisson_like", "_random_uniform_like",
    "_sample_exponential", "_sample_gamma", "_sample_generalized_negative_binomial", "_sample_multinomial",
    "_sample_negative_binomial", "_sample_normal", "_sample_poisson", "_sample_uniform", "_npi_bernoulli",
    "_npi_choice", "_npi_exponential", "_npi_gamma", "_npi_gumbel", "_npi_logistic", "_npi_multinomial",
    "_npi_normal", "_npi_normal_n", "_npi_pareto", "_npi_powerd", "_npi_rayleigh", "_npi_uniform",
    "_npi_uniform_n", "_npi_weibull",
)
# Probability densities.
DENSITIES = (
    "_random_pdf_dirichlet", "_random_pdf_exponential", "_random_pdf_gamma",
    "_random_pdf_generalized_negative_binomial", "_random_pdf_negative_binomial", "_random_pdf_normal",
    "_random_pdf_poisson", "_random_pdf_uniform",
)
# Image decoding and augmentation.
IMAGES = (
    "_cvcopyMakeBorder", "_cvimdecode", "_cvimread", "_cvimresize", "_imdecode", "_image_adjust_lighting",
    "_image_crop", "_image_flip_left_right", "_image_flip_top_bottom", "_image_normalize",
    "_image_random_brightness", "_image_random_color_jitter", "_image_random_contrast",
    "_image_random_flip_left_right", "_image_random_flip_top_bottom", "_image_random_hue",
    "_image_random_lighting", "_image_random_saturation", "_image_resize", "_image_to_tensor",
)
# Eight-bit arithmetic, its ranges and its conversions.
QUANTIZED = (
    "_contrib_calibrate_entropy", "_contrib_dequantize", "_contrib_quantize", "_contrib_quantize_asym",
    "_contrib_quantize_v2", "_contrib_quantized_act", "_contrib_quantized_batch_norm",
    "_contrib_quantized_concat", "_contrib_quantized_conv", "_contrib_quantized_elemwise_add",
    "_contrib_quantized_elemwise_mul", "_contrib_quantized_embedding", "_contrib_quantized_flatten",
    "_contrib_quantized_fully_connected", "_contrib_quantized_pooling", "_contrib_quantized_rnn",
    "_contrib_requantize",
)
# Weight updates in place, some with FP32 masters beside low-precision weights.
OPTIMIZERS = (
    "_adamw_update", "_mp_adamw_update", "_multi_adamw_update", "_multi_lamb_update",
    "_multi_mp_adamw_update", "_multi_mp_lamb_update", "_contrib_group_adagrad_update",
    "_sparse_adagrad_update", "adam_update", "ftml_update", "ftrl_update", "lamb_update_phase1",
    "lamb_update_phase2", "mp_lamb_update_phase1", "mp_lamb_update_phase2", "mp_nag_mom_update",
    "mp_sgd_mom_update", "mp_sgd_update", "multi_lars", "multi_mp_sgd_mom_update", "multi_mp_sgd_update",
    "multi_sgd_mom_update", "multi_sgd_update", "nag_mom_update", "preloaded_multi_mp_sgd_mom_update",
    "preloaded_multi_mp_sgd_update", "preloaded_multi_sgd_mom_update", "preloaded_multi_sgd_update",
    "rmsprop_update", "rmspropalex_update", "sgd_mom_update", "sgd_update", "signsgd_update", "signum_update",
    "reset_arrays",
)
# Checks of gradients: whether all are finite, and their norm.
GRADIENT_CHECKS = ("all_finite", "multi_all_finite", "multi_sum_sq")
# Writes into a part of a tensor, and copies between arrays.
IN_PLACE = (
    "_copyto", "_slice_assign", "_slice_assign_scalar", "_scatter_set_nd", "_npi_boolean_mask_assign_scalar",
    "_npi_boolean_mask_assign_tensor", "_onehot_encode", "fill_element_0index",
)
# Storage of sparse tensors, and graphs stored as such.
SPARSE_STORAGE = (
    "cast_storage", "_sparse_retain", "_contrib_getnnz", "_contrib_edge_id", "_contrib_dgl_adjacency",
    "_contrib_dgl_csr_neighbor_non_uniform_sample", "_contrib_dgl_csr_neighbor_uniform_sample",
    "_contrib_dgl_graph_compact", "_contrib_dgl_subgraph",
)
# Loops and branches over subgraphs.
CONTROL_FLOW = ("_foreach", "_while_loop", "_cond")
# Operators written in Python.
USER_CODE = ("Custom", "_CustomFunction", "_Native", "_NDArray")
# What MXNet inserts itself.
MACHINERY = (
    "_CachedOp", "_CachedOpThreadSafe", "_CrossDeviceCopy", "_NoGradient", "_identity_with_attr_like_rhs",
    "_npx_constraint_check",
)
