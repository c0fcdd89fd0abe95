// GELU, x times the normal distribution at x, as MXNet's LeakyReLU computes it with act_type='gelu'.
#include <algorithm>

#include "families.h"
#include "pointwise.h"
#include "softmax.h"
#include "vector.h"

namespace gluon_amp {

namespace {

struct Settings {
  explicit Settings(const Attributes&) {}
  static constexpr int64_t kRange = 16384;
};

// The normal distribution at -t is exp(-t^2 / 2) times this, for t >= 0: a polynomial fitted to 6e-8.
INLINED float ratio_of_tail(float t) {
  const float u = 1 / (1 + 0.3f * t);
  float sum = 0.03833285f;
  sum = sum * u - 0.16894569f;
  sum = sum * u + 0.22820553f;
  sum = sum * u - 0.07598738f;
  sum = sum * u + 0.14217743f;
  sum = sum * u + 0.09483592f;
  sum = sum * u + 0.12188137f;
  sum = sum * u + 0.11949315f;
  sum = sum * u + 6.848225e-06f;
  return sum;
}

struct Normal {
  float distribution, density;
};

INLINED Normal normal_at(float x) {
  constexpr float kDensityAt0 = 0.398942280f;
  const float t = __builtin_fabsf(x), power = exp_of_negative(-0.5f * t * t), tail = power * ratio_of_tail(t);
  return {x < 0 ? tail : 1 - tail, kDensityAt0 * power};
}

// Values are read and written in loops of their own: with 16-bit types in it a loop of AVX512F has half the width.
constexpr int64_t kBlock = 512;

template <class T>
INLINED void load(const T* data, float* values, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) values[i] = to_float(data[i]);
}

template <class T>
INLINED void save(const float* values, T* data, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(values[i], &data[i]);
}

template <class T>
INLINED void forward_loop(const T* data, T* out, int64_t size) {
  float values[kBlock];
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    load(data + start, values, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) values[i] *= normal_at(values[i]).distribution;
    save(values, out + start, count);
  }
}

template <class T>
INLINED void backward_loop(const T* out_grad, const T* data, T* data_grad, int64_t size) {
  float values[kBlock], grads[kBlock];
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    load(data + start, values, count);
    load(out_grad + start, grads, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const Normal normal = normal_at(values[i]);
      grads[i] *= normal.distribution + values[i] * normal.density;
    }
    save(grads, data_grad + start, count);
  }
}

#define KERNELS(T)                                                                                                  \
  VECTORIZED void forward_kernel(const T* data, T* out, int64_t count, const Settings&) {                           \
    forward_loop(data, out, count);                                                                                 \
  }                                                                                                                 \
  VECTORIZED void backward_kernel(const T* out_grad, const T* data, T* data_grad, int64_t count, const Settings&) { \
    backward_loop(out_grad, data, data_grad, count);                                                                \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

}  // namespace

const Operator gelu = Pointwise<Settings>::named("_gluon_amp_gelu");

}  // namespace gluon_amp
