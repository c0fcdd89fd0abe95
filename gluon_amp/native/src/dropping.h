// Which values dropout keeps. It follows from a key and from where a value is, so that backward finds the same again
// and nothing has to be kept for it. The key comes from MXNet's random numbers: its own Dropout, with a probability of
// a half, of kKeyBits ones. Outside of training that leaves them as they are, and nothing is dropped.
#pragma once

#include <cstdint>

#include "operator.h"

namespace gluon_amp {

constexpr uint32_t kKeyBits = 64;

struct Dropping {
  Dropping() = default;
  Dropping(double probability, const Tensor& bits) {
    for (uint32_t i = 0; i < kKeyBits; ++i) {
      key |= static_cast<uint64_t>(bits.as<float>()[i] > 1) << i;
      drops |= bits.as<float>()[i] != 1;
    }
    kept = static_cast<int32_t>((1 - probability) * (1 << 24));
    factor = static_cast<float>(1 / (1 - probability));
  }

  bool drops = false;
  uint64_t key = 0;
  int32_t kept = 0;  // of 2^24 values
  float factor = 1;  // of those that are kept
};

INLINED uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Write what values are multiplied by: those of one row, of which there may be 2^64.
INLINED void write_factors(const Dropping& dropping, uint64_t row, float* factors, int64_t width) {
  const uint64_t key = mixed(mixed(dropping.key) + row * 0x9e3779b97f4a7c15);
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  const int32_t count = static_cast<int32_t>(width), kept = dropping.kept;
  const float factor = dropping.factor;
#pragma omp simd
  for (int32_t i = 0; i < count; ++i) {
    uint32_t x = static_cast<uint32_t>(i) * 0x9e3779b9u + low;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15) ^ high) * 0x846ca68bu;
    x ^= x >> 16;
    factors[i] = static_cast<int32_t>(x >> 8) < kept ? factor : 0.f;
  }
}

// The probability of an operator's attributes.
double drop_probability(const Attributes& attributes);

}  // namespace gluon_amp
