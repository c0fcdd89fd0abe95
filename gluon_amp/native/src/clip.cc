// Limits on values, as MXNet's clip sets them: values at a limit have a gradient, and what is not a number stays that.
#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768;

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

#define KERNELS(T)                                                                                          \
  VECTORIZED void forward_kernel(const T* data, T* out, int64_t count, float low, float high) {             \
    forward_loop(data, out, count, low, high);                                                              \
  }                                                                                                         \
  VECTORIZED void backward_kernel(const T* out_grad, const T* data, T* data_grad, int64_t count, float low, \
                                  float high) {                                                             \
    backward_loop(out_grad, data, data_grad, count, low, high);                                             \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

struct Limits {
  explicit Limits(const Attributes& attributes)
      : low(static_cast<float>(attributes.number("a_min"))), high(static_cast<float>(attributes.number("a_max"))) {}
  float low, high;
};

template <class T>
void forward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Limits limits(attributes);
  parallel_ranges(inputs[0].size(), kRange, [&](int64_t begin, int64_t end) {
    forward_kernel(inputs[0].as<const T>() + begin, outputs[0].as<T>() + begin, end - begin, limits.low, limits.high);
  });
}

template <class T>
void backward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Limits limits(attributes);
  parallel_ranges(inputs[1].size(), kRange, [&](int64_t begin, int64_t end) {
    backward_kernel(inputs[0].as<const T>() + begin, inputs[1].as<const T>() + begin, outputs[0].as<T>() + begin,
                    end - begin, limits.low, limits.high);
  });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[0].type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(attributes, inputs, outputs);
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[1].type == kBfloat16 ? backward_as<bfloat16> : backward_as<float>)(attributes, inputs, outputs);
}

void types(const Attributes&, Types& inputs, Types& outputs) { outputs[0] = inputs[0] = data_type(inputs[0], "data"); }

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  Limits{attributes};  // for errors at the call, not when it is run
  expect_known(inputs[0], "data");
  outputs[0] = inputs[0];
}

Arity arity(const Attributes&) { return {1, 1}; }

}  // namespace

const Operator clip{"_gluon_amp_clip", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
