// Softmax of rows, for operators that contain one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "exponential.h"

namespace gluon_amp {

// exp(x) for x <= 0, to the last bit but one; 0 where the result would be denormal. NaN stays that.
INLINED float exp_of_negative(float x) { return x < -87.f ? 0.f : exp_within_range(x); }

INLINED float largest(const float* values, int64_t length) {
  float most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < length; ++i) most = values[i] > most ? values[i] : most;
  return most;
}

// Write the shares of a row, maybe where its scores are. Those behind `length` are 0.
INLINED void softmax(const float* scores, float* shares, int64_t length, int64_t width) {
  const float most = largest(scores, length);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < length; ++i) {
    shares[i] = exp_of_negative(scores[i] - most);
    sum += shares[i];
  }
  const float share = 1 / sum;
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) shares[i] *= share;
  std::fill(shares + length, shares + width, 0.f);
}

}  // namespace gluon_amp
