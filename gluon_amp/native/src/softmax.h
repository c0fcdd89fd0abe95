// Softmax of rows, for operators that contain one.
#pragma once

#include <cstdint>
#include <limits>

#include "exponential.h"

namespace gluon_amp {

// exp(x) for x <= 0, to the last bit but one; 0 where the result would be denormal. NaN stays that.
INLINED float exp_of_negative(float x) { return x < -87.f ? 0.f : exp_within_range(x); }

// Scores may be where the weights go. A bias, if there is one, is added to the scores.
template <class T>
INLINED void softmax(float* scores, const float* bias, T* weights, int64_t width) {
  float most = -std::numeric_limits<float>::infinity(), sum = 0;
  if (bias) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) scores[i] += bias[i];
  }
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < width; ++i) most = scores[i] > most ? scores[i] : most;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) {
    scores[i] = exp_of_negative(scores[i] - most);
    sum += scores[i];
  }
  const float share = 1 / sum;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) store(scores[i] * share, &weights[i]);
}

// The gradient of scores from that of weights, which it may overwrite.
template <class T>
INLINED void softmax_backward(const T* weights, const float* weight_grads, T* score_grads, int64_t width) {
  float product = 0;
#pragma omp simd reduction(+ : product)
  for (int64_t i = 0; i < width; ++i) product += to_float(weights[i]) * weight_grads[i];
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) store(to_float(weights[i]) * (weight_grads[i] - product), &score_grads[i]);
}

}  // namespace gluon_amp
