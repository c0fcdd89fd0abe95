// Values times a hard sigmoid of theirs, x * (clip(x + shift, a_min, a_max) / divisor), as MXNet's operators compute it
// one after the other: values at a limit have a gradient, and what is not a number stays that. Maps may lie in any
// order.
#include "families.h"
#include "pointwise.h"
#include "vector.h"

namespace gluon_amp {

namespace {

struct Settings {
  explicit Settings(const Attributes& attributes)
      : shift(static_cast<float>(attributes.number("shift"))),
        low(static_cast<float>(attributes.number("a_min"))),
        high(static_cast<float>(attributes.number("a_max"))),
        divisor(static_cast<float>(attributes.number("divisor"))) {}
  static constexpr int64_t kRange = 32768;
  float shift, low, high, divisor;
};

INLINED float gate(float value, const Settings& s) {
  const float moved = value + s.shift;
  const float risen = moved < s.low ? s.low : moved;
  return (risen > s.high ? s.high : risen) / s.divisor;
}

template <class T>
INLINED void forward_loop(const T* data, T* out, int64_t count, const Settings& s) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]);
    store(value * gate(value, s), &out[i]);
  }
}

template <class T>
INLINED void backward_loop(const T* out_grad, const T* data, T* data_grad, int64_t count, const Settings& s) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]), grad = to_float(out_grad[i]), moved = value + s.shift;
    const float through = (moved < s.low) | (moved > s.high) ? 0.f : grad * value / s.divisor;
    store(grad * gate(value, s) + through, &data_grad[i]);
  }
}

#define KERNELS(T)                                                                                                    \
  VECTORIZED void forward_kernel(const T* data, T* out, int64_t count, const Settings& s) {                           \
    forward_loop(data, out, count, s);                                                                                \
  }                                                                                                                   \
  VECTORIZED void backward_kernel(const T* out_grad, const T* data, T* data_grad, int64_t count, const Settings& s) { \
    backward_loop(out_grad, data, data_grad, count, s);                                                               \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

}  // namespace

const Operator hard_swish = Pointwise<Settings>::named("_gluon_amp_hard_swish");

}  // namespace gluon_amp
