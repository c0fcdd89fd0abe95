// exp, in operations that the compiler turns into vector instructions.
#pragma once

#include <cstdint>
#include <cstring>

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

}  // namespace gluon_amp
