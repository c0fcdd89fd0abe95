// Limits on values, as MXNet's clip sets them: values at a limit have a gradient, and what is not a number stays that.
#include "families.h"
#include "pointwise.h"
#include "vector.h"

namespace gluon_amp {

namespace {

struct Limits {
  explicit Limits(const Attributes& attributes)
      : low(static_cast<float>(attributes.number("a_min"))), high(static_cast<float>(attributes.number("a_max"))) {}
  static constexpr int64_t kRange = 32768;
  float low, high;
};

INLINED float chosen(bool condition, float one, float other) { return condition ? one : other; }

// Between structures compilers choose by a branch, which random data makes slow.
INLINED bfloat16 chosen(bool condition, bfloat16 one, bfloat16 other) {
  return {static_cast<uint16_t>(condition ? one.bits : other.bits)};
}

template <class T>
INLINED void forward_loop(const T* data, T* out, int64_t count, float low, float high) {
  T lowest, highest;
  store(low, &lowest);
  store(high, &highest);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]);
    out[i] = chosen(value > high, highest, chosen(value < low, lowest, data[i]));
  }
}

template <class T>
INLINED void backward_loop(const T* out_grad, const T* data, T* data_grad, int64_t count, float low, float high) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]);
    data_grad[i] = chosen((value > high) | (value < low), T{}, out_grad[i]);
  }
}

#define KERNELS(T)                                                                               \
  VECTORIZED void forward_kernel(const T* data, T* out, int64_t count, const Limits& limits) {   \
    forward_loop(data, out, count, limits.low, limits.high);                                     \
  }                                                                                              \
  VECTORIZED void backward_kernel(const T* out_grad, const T* data, T* data_grad, int64_t count, \
                                  const Limits& limits) {                                        \
    backward_loop(out_grad, data, data_grad, count, limits.low, limits.high);                    \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

}  // namespace

const Operator clip = Pointwise<Limits>::named("_gluon_amp_clip");

}  // namespace gluon_amp
