"""Data movement: shapes, joins, slices, indexing, ordering."""
from __future__ import annotations

# Copies that autograd sees.
IDENTITIES = ("_copy", "_np_copy", "BlockGrad", "_contrib_gradientmultiplier")
# New shapes for the same elements in the same order.
RESHAPES = (
    "Reshape", "_np_reshape", "_npx_reshape", "expand_dims", "_np_atleast_1d", "_np_atleast_2d",
    "_np_atleast_3d",
)
# Axes merged or dropped.
FLATTENING = ("Flatten", "squeeze", "_np_squeeze")
# Axes in another order, elements rotated or rolled.
MOVED_AXES = ("_np_transpose", "_np_moveaxis", "_npi_rot90", "_np_roll")
# Elements in the reverse order.
REVERSALS = ("reverse", "_npi_flip")
# Blocks of pixels to channels and back.
BLOCKS = ("depth_to_space", "space_to_depth")
# One tensor to several.
SPLITS = ("SliceChannel", "_split_v2", "_npi_hsplit", "_npi_dsplit")
# Elements repeated; the gradient is a sum.
REPETITIONS = ("tile", "repeat", "broadcast_to", "broadcast_axis")
# Diagonals and triangles.
DIAGONALS = ("diag", "_np_diag", "_np_diagflat", "_np_diagonal", "_npi_tril")
# Sliding windows to columns and back.
PATCHES = ("im2col", "col2im")
# Tensors joined along an axis.
JOINS = (
    "Concat", "stack", "_npi_concatenate", "_npi_stack", "_npi_vstack", "_npi_hstack", "_npi_dstack",
    "_npi_column_stack",
)
# Inputs: condition and one tensor.
NUMPY_WHERE_SCALAR = ("_npi_where_lscalar", "_npi_where_rscalar")
# Inputs: data, indices or mask.
GATHERS = ("gather_nd", "batch_take", "_contrib_boolean_mask")
# Inputs: data, indices; or old, index, new.
SCATTERS = ("scatter_nd", "_contrib_index_copy")
# Elements inserted, deleted, or made unique.
INSERTIONS = ("_npi_delete", "_npi_insert_scalar", "_npi_insert_slice", "_npi_insert_tensor", "_npi_unique")
# Sorting.
SORTING = ("sort", "argsort", "topk")
# Positions of extremes, numbered in the input's type or as integers.
ARGMAX = ("argmax", "argmin", "argmax_channel", "_npi_argmax", "_npi_argmin")
# Indices made from indices.
INDICES = ("one_hot", "_ravel_multi_index", "_unravel_index")
# Constants in the shape and type of the input.
FILLED_LIKE = ("zeros_like", "ones_like")
# Integers that depend on shapes, or on which elements are zero.
SHAPES = (
    "shape_array", "size_array", "_contrib_index_array", "_npi_diag_indices_from", "_npx_nonzero",
    "_npi_share_memory",
)
