// Code that the compiler turns into vector instructions, once for each instruction set; the fastest one that the CPU
// has is chosen when the library is loaded.
//
// A kernel is a loop in a template that is always inlined, and a function marked VECTORIZED that calls it IN_TYPE:
// attributes of templates do not reach the copies for each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif
#define INLINED inline __attribute__((always_inline))
// Run a statement with T for bfloat16 or float.
#define IN_TYPE(type, ...)     \
  do {                         \
    if ((type) == kBfloat16) { \
      using T = bfloat16;      \
      __VA_ARGS__;             \
    } else {                   \
      using T = float;         \
      __VA_ARGS__;             \
    }                          \
  } while (false)

namespace gluon_amp {

struct bfloat16 {
  uint16_t bits;
};

INLINED float to_float(float value) { return value; }

INLINED float to_float(bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

INLINED void store(float value, float* target) { *target = value; }

// Round to nearest, ties to even; what is not a number stays that.
INLINED void store(float value, bfloat16* target) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
  target->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

}  // namespace gluon_amp
