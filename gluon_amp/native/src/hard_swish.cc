// Values times a hard sigmoid of theirs, x * (clip(x + shift, a_min, a_max) / divisor), as MXNet's operators compute it
// one after the other: values at a limit have a gradient, and what is not a number stays that. Maps may lie in any
// order.
#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768;

struct Settings {
  explicit Settings(const Attributes& attributes)
      : shift(static_cast<float>(attributes.number("shift"))),
        low(static_cast<float>(attributes.number("a_min"))),
        high(static_cast<float>(attributes.number("a_max"))),
        divisor(static_cast<float>(attributes.number("divisor"))) {}
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

template <class T>
void forward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  parallel_ranges(inputs[0].size(), kRange, [&](int64_t begin, int64_t end) {
    forward_kernel(inputs[0].as<const T>() + begin, outputs[0].as<T>() + begin, end - begin, s);
  });
}

template <class T>
void backward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  parallel_ranges(inputs[1].size(), kRange, [&](int64_t begin, int64_t end) {
    backward_kernel(inputs[0].as<const T>() + begin, inputs[1].as<const T>() + begin, outputs[0].as<T>() + begin,
                    end - begin, s);
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
  Settings{attributes};  // for errors at the call, not when it is run
  expect_known(inputs[0], "data");
  outputs[0] = inputs[0];
}

Arity arity(const Attributes&) { return {1, 1}; }

}  // namespace

const Operator hard_swish{"_gluon_amp_hard_swish", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
