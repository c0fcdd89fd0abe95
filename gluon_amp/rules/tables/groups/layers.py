"""Neural-network layers: convolutions, normalisation, activations, losses, detection."""
from __future__ import annotations

# Batched products of attention layers whose queries, keys and values share one tensor.
ATTENTION = (
    "_contrib_interleaved_matmul_selfatt_qk", "_contrib_interleaved_matmul_selfatt_valatt",
    "_contrib_interleaved_matmul_encdec_qk", "_contrib_interleaved_matmul_encdec_valatt",
)
# What optimize_for('MKLDNN') fuses layers into; on the CPU only.
ONEDNN_SUBGRAPHS = (
    "_sg_mkldnn_conv", "_sg_mkldnn_fully_connected", "_sg_mkldnn_selfatt_qk", "_sg_mkldnn_selfatt_valatt",
)
# Convolutions that read at learned offsets.
DEFORMABLE_CONVOLUTIONS = ("_contrib_DeformableConvolution", "_contrib_ModulatedDeformableConvolution")
# Inputs: data, gamma, beta, moving mean, moving variance.
BATCH_NORMS = ("BatchNorm", "_contrib_BatchNormWithReLU")
# Normalisation by statistics of the data itself.
NORMS = ("LayerNorm", "GroupNorm", "InstanceNorm", "L2Normalization")
# Rectifiers.
RELU = ("relu", "_npx_relu")
# Bounded activation functions.
SIGMOIDS = ("sigmoid", "_npx_sigmoid", "tanh", "_npi_tanh")
# Bounded activation functions without exponentials.
PIECEWISE_SIGMOIDS = ("hard_sigmoid", "softsign")
# Resizing of feature maps.
RESIZING = ("UpSampling", "_contrib_BilinearResize2D")
# Superseded forms of layers, kept for old models.
OLD_LAYERS = ("Convolution_v1", "Pooling_v1", "BatchNorm_v1")
# Softmax along an axis.
SOFTMAX = ("softmax", "log_softmax")
# Further forms of softmax.
OTHER_SOFTMAX = ("softmin", "SoftmaxActivation", "softmax_cross_entropy")
# Output layers whose backward is a loss's gradient times their attribute `grad_scale`.
LOSS_OUTPUTS = (
    "SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput", "MakeLoss",
)
# Losses, and output layers without `grad_scale`.
LOSSES = ("SVMOutput", "make_loss", "CTCLoss", "smooth_l1", "IdentityAttachKLSparseReg")
# Inputs: indices, weight.
EMBEDDINGS = ("Embedding", "_contrib_SparseEmbedding")
# Inputs: data, lengths of its sequences.
SEQUENCES = ("SequenceLast", "SequenceMask", "SequenceReverse")
# Anchors, boxes, scores and their matching.
BOXES = (
    "_contrib_MultiBoxPrior", "_contrib_MultiBoxTarget", "_contrib_MultiBoxDetection", "_contrib_box_nms",
    "_contrib_box_iou", "_contrib_box_encode", "_contrib_box_decode", "_contrib_bipartite_matching",
    "_contrib_Proposal", "_contrib_MultiProposal",
)
# Pooling over regions given by coordinates.
REGIONS = (
    "ROIPooling", "_contrib_ROIAlign", "_contrib_RROIAlign", "_contrib_PSROIPooling",
    "_contrib_DeformablePSROIPooling",
)
# Sampling at coordinates, and comparison of displaced patches.
GRIDS = ("BilinearSampler", "GridGenerator", "SpatialTransformer", "Correlation")
