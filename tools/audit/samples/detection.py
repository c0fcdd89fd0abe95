"""Samples of detection and vision operators."""
from __future__ import annotations

from typing import Iterable

from .sample import Sample, fixed, low, sample

_FEATURES = low(2, 16, 12, 12)
_CORNERS = low(1, 30, 4, values="boxes")


def _boxes() -> Iterable[Sample]:
    yield sample("_contrib_box_nms", low(1, 20, 6, values="detections"), id_index=0, score_index=1, coord_start=2)
    for kind in ("corner", "center"):
        yield sample("_contrib_box_iou", (low(10, 4, values="boxes"), low(12, 4, values="boxes")), format=kind)
    yield sample("_contrib_box_decode", (low(1, 30, 4), _CORNERS), format="corner")
    yield sample("_contrib_box_encode", (
        fixed(1, 30, values="valid"), fixed(1, 30, values="grid_index:5"), _CORNERS, low(1, 5, 4, values="boxes"),
        fixed(4, values="zeros"), fixed(4, values="ones")), gradient=False)
    yield sample("_contrib_bipartite_matching", low(1, 8, 10, values="distinct"), threshold=0.1, gradient=False)
    yield sample("_contrib_MultiBoxPrior", _FEATURES, sizes="(0.2, 0.4)", ratios="(1, 2)", gradient=False)
    yield sample("_contrib_MultiBoxTarget", (_CORNERS, low(1, 3, 5, values="box_labels"), low(1, 3, 30)),
                 gradient=False)
    yield sample("_contrib_MultiBoxTarget", (fixed(1, 30, 4, values="boxes"), fixed(1, 3, 5, values="box_labels"),
                                             low(1, 3, 30)), gradient=False, note="FP32 anchors and labels")
    yield sample("_contrib_MultiBoxDetection", (low(1, 3, 30, values="zero_one"), low(1, 120), _CORNERS),
                 gradient=False)
    for op in ("_contrib_Proposal", "_contrib_MultiProposal"):
        yield sample(op, (low(1, 24, 6, 6, values="zero_one"), low(1, 48, 6, 6, values="small"),
                          fixed(1, 3, values="constant:96")), rpn_pre_nms_top_n=50, rpn_post_nms_top_n=10,
                     gradient=False)


def _regions() -> Iterable[Sample]:
    rois = low(5, 5, values="rois")
    yield sample("ROIPooling", (_FEATURES, rois), pooled_size="(2, 2)", spatial_scale=1.0, gradient=True)
    yield sample("_contrib_ROIAlign", (_FEATURES, rois), pooled_size="(2, 2)", spatial_scale=1.0, sample_ratio=2)
    yield sample("_contrib_ROIAlign", (_FEATURES, fixed(5, 5, values="rois")), pooled_size="(2, 2)",
                 spatial_scale=1.0, sample_ratio=2, note="FP32 regions")
    yield sample("_contrib_RROIAlign", (_FEATURES, low(5, 6, values="rotated_rois")), pooled_size="(2, 2)",
                 spatial_scale=1.0, sampling_ratio=2, gradient=False)
    yield sample("_contrib_PSROIPooling", (_FEATURES, rois), spatial_scale=1.0, output_dim=4, pooled_size=2,
                 group_size=2)
    yield sample("_contrib_DeformablePSROIPooling", (_FEATURES, rois, low(5, 2, 2, 2)), spatial_scale=1.0,
                 output_dim=4, group_size=2, pooled_size=2, part_size=2, sample_per_part=2)
    deformable = (low(16, 16, 3, 3, values="small"), low(16))
    yield sample("_contrib_DeformableConvolution", (_FEATURES, low(2, 18, 12, 12, values="small"), *deformable),
                 kernel="(3, 3)", num_filter=16, pad="(1, 1)", tolerance=8)
    yield sample("_contrib_ModulatedDeformableConvolution", (
        _FEATURES, low(2, 18, 12, 12, values="small"), low(2, 9, 12, 12, values="zero_one"), *deformable),
        kernel="(3, 3)", num_filter=16, pad="(1, 1)", tolerance=8)


def _resampling() -> Iterable[Sample]:
    yield sample("UpSampling", _FEATURES, scale=2, sample_type="nearest", num_args=1)
    yield sample("UpSampling", (_FEATURES, low(16, 1, 4, 4, values="positive")), scale=2, sample_type="bilinear",
                 num_filter=16, num_args=2)
    yield sample("_contrib_BilinearResize2D", _FEATURES, height=24, width=24)
    yield sample("_contrib_BilinearResize2D", (_FEATURES, low(2, 16, 20, 20)), mode="like")
    grid = low(2, 2, 12, 12, values="unit")
    yield sample("BilinearSampler", (_FEATURES, grid), tolerance=16)
    yield sample("GridGenerator", low(2, 6), transform_type="affine", target_shape="(8, 8)")
    yield sample("GridGenerator", low(2, 2, 8, 8), transform_type="warp", target_shape="(8, 8)")
    yield sample("SpatialTransformer", (_FEATURES, low(2, 6, values="unit")), target_shape="(8, 8)",
                 transform_type="affine", sampler_type="bilinear", tolerance=16)
    yield sample("Correlation", (_FEATURES, _FEATURES), kernel_size=1, max_displacement=2, pad_size=2)
    yield sample("_contrib_count_sketch", (low(4, 16), fixed(1, 16, values="labels:8"), fixed(1, 16, values="ones")),
                 out_dim=8)


def _images() -> Iterable[Sample]:
    image = low(16, 8, 3, values="zero_one")
    yield sample("_image_normalize", low(3, 16, 8, values="zero_one"), mean="(0.5, 0.5, 0.5)", std="(0.5, 0.5, 0.5)")
    yield sample("_image_to_tensor", image, gradient=False)
    yield sample("_image_flip_left_right", image, gradient=False)
    yield sample("_image_flip_top_bottom", image, gradient=False)
    yield sample("_image_adjust_lighting", image, alpha="(0.1, 0.1, 0.1)", gradient=False)
    yield sample("_image_crop", image, x=1, y=2, width=4, height=5)
    yield sample("_image_resize", image, size="(8, 8)", gradient=False)


SAMPLES: tuple[Sample, ...] = (*_boxes(), *_regions(), *_resampling(), *_images())
