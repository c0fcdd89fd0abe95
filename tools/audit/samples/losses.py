"""Samples of losses, output layers and densities."""
from __future__ import annotations

from .sample import Sample, fixed, low, sample

_DATA, _LABELS = low(24, 40), fixed(24, values="labels:40")

SAMPLES: tuple[Sample, ...] = (
    sample("SoftmaxOutput", (_DATA, _LABELS)),
    sample("SoftmaxOutput", (low(2, 16, 6, 8), fixed(2, 6, 8, values="labels:16")), multi_output=True),
    sample("softmax_cross_entropy", (_DATA, _LABELS)),
    *(sample(op, (_DATA, low(24, values="labels:40")), note="label in low precision")
      for op in ("SoftmaxOutput", "softmax_cross_entropy", "SVMOutput")),
    *(sample(op, (low(24, 8), fixed(24, 8, values="labels:2")), note="FP32 label")
      for op in ("LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput")),
    *(sample(op, (low(24, 8), low(24, 8, values="zero_one")), gradient=op != "MAERegressionOutput",
             note="label in low precision")
      for op in ("LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput")),
    sample("SVMOutput", (_DATA, _LABELS)),
    sample("CTCLoss", (low(20, 4, 12), fixed(4, 5, values="length:11")), tolerance=8),
    sample("_random_pdf_normal", (low(4, 30), low(4), low(4, values="positive")), tolerance=8),
    sample("_random_pdf_uniform", (low(4, 30, values="zero_one"), low(4, values="constant:-1"),
                                   low(4, values="constant:2")), tolerance=8),
    sample("_random_pdf_gamma", (low(4, 30, values="positive"), low(4, values="positive"), low(4, values="positive")),
           tolerance=8),
    sample("_random_pdf_exponential", (low(4, 30, values="positive"), low(4, values="positive")), tolerance=8),
    sample("_random_pdf_poisson", (low(4, 30, values="labels:6"), low(4, values="positive")), tolerance=8),
    sample("_random_pdf_negative_binomial", (low(4, 30, values="labels:6"), low(4, values="positive"),
                                             low(4, values="zero_one")), tolerance=8),
    sample("_random_pdf_generalized_negative_binomial", (low(4, 30, values="labels:6"), low(4, values="positive"),
                                                         low(4, values="zero_one")), tolerance=8),
    sample("_random_pdf_dirichlet", (low(4, 30, 3, values="softmax"), low(4, 3, values="positive")), tolerance=8),
)
