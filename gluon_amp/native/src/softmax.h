// Softmax of rows, for operators that contain one.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "vector.h"

namespace gluon_amp {

// exp(x) for x <= 0, to the last bit but one; 0 where the result would be denormal. NaN stays that.
INLINED float exp_of_negative(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kRounding = 12582912.f;
  const float shifted = x * kLog2E + kRounding, whole = shifted - kRounding;
  const float r = (x - whole * kLn2High) - whole * kLn2Low;
  float sum = 1.9875691500e-4f;
  sum = sum * r + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * r * r + r + 1;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127 - 0x4b400000u) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -87.f ? 0.f : sum * power;
}

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
