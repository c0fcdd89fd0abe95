// exp and softmax of rows, in operations that the compiler turns into vector instructions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "vector.h"

namespace gluon_amp {

// exp(x) for -87 <= x <= 88, to the last bit but one. NaN stays that.
INLINED float exp_within_range(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRounding = 12582912.f;  // adding it rounds to an integer, which is in the last bits then
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
  bits = (bits + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return sum * power;
}

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
