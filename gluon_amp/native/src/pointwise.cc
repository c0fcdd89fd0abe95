// Operators that compute each value of the result from one of the data: clip, GELU, swish and hard swish. Maps may lie
// in any order. Values at a limit have a gradient, and what is not a number stays that, as in MXNet.
#include <algorithm>

#include "exponential.h"
#include "operator.h"

namespace gluon_amp {

namespace {

// Settings are made of the attributes, and throw where one is wrong. kRange is how many values a thread takes at once,
// by forward_range and backward_range.
template <class Settings>
struct Pointwise {
  static void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
    const Settings s(attributes);
    parallel_ranges(inputs[0].size(), Settings::kRange,
                    [&](int64_t begin, int64_t end) { forward_range(s, inputs, outputs, begin, end - begin); });
  }

  static void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
    const Settings s(attributes);
    parallel_ranges(inputs[1].size(), Settings::kRange,
                    [&](int64_t begin, int64_t end) { backward_range(s, inputs, outputs, begin, end - begin); });
  }

  static void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
    Settings{attributes};  // for errors at the call, not when it is run
    expect_known(inputs[0], "data");
    outputs[0] = inputs[0];
  }

  static constexpr Operator named(const char* name) { return {name, takes<1>, data_types, shapes, forward, backward}; }
};

// Limits on values, as MXNet's clip sets them.
struct Limits {
  explicit Limits(const Attributes& attributes) : low(attributes.real("a_min")), high(attributes.real("a_max")) {}
  static constexpr int64_t kRange = 32768;
  float low, high;
};

INLINED float chosen(bool condition, float one, float other) { return condition ? one : other; }

// Between structures compilers choose by a branch, which random data makes slow.
INLINED bfloat16 chosen(bool condition, bfloat16 one, bfloat16 other) {
  return {static_cast<uint16_t>(condition ? one.bits : other.bits)};
}

template <class T>
INLINED void clip_loop(const T* data, T* out, int64_t count, Limits s) {
  T lowest, highest;
  store(s.low, &lowest);
  store(s.high, &highest);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]);
    out[i] = chosen(value > s.high, highest, chosen(value < s.low, lowest, data[i]));
  }
}

VECTORIZED void forward_range(const Limits& s, const Tensors& in, const Tensors& out, int64_t begin, int64_t count) {
  IN_TYPE(in[0].type, clip_loop(in[0].as<const T>() + begin, out[0].as<T>() + begin, count, s));
}

template <class T>
INLINED void clip_gradient(const T* out_grad, const T* data, T* data_grad, int64_t count, Limits s) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]);
    data_grad[i] = chosen((value > s.high) | (value < s.low), T{}, out_grad[i]);
  }
}

VECTORIZED void backward_range(const Limits& s, const Tensors& in, const Tensors& out, int64_t begin, int64_t count) {
  IN_TYPE(in[0].type,
          clip_gradient(in[0].as<const T>() + begin, in[1].as<const T>() + begin, out[0].as<T>() + begin, count, s));
}

// Operators that multiply x by a factor between 0 and 1, which grows with x.
struct Factor {
  float value, slope;
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

// GELU, x times the normal distribution at x, as MXNet's LeakyReLU computes it with act_type='gelu'.
struct Normal {
  explicit Normal(const Attributes&) {}
  INLINED Factor at(float x) const {
    constexpr float kDensityAt0 = 0.398942280f;
    const float t = __builtin_fabsf(x), power = exp_of_negative(-0.5f * t * t), tail = power * ratio_of_tail(t);
    return {x < 0 ? tail : 1 - tail, kDensityAt0 * power};
  }
  static constexpr int64_t kRange = 16384;
};

// Swish, x times the sigmoid of beta * x.
struct Sigmoid {
  explicit Sigmoid(const Attributes& attributes) : beta(attributes.real("beta", 1)) {}
  INLINED Factor at(float x) const {
    const float t = beta * x, power = exp_of_negative(-__builtin_fabsf(t)), most = 1 / (1 + power),
                least = power * most;
    return {t < 0 ? least : most, beta * (most * least)};
  }
  static constexpr int64_t kRange = 16384;
  float beta;
};

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

template <class T, class Curve>
INLINED void curve_loop(const T* data, T* out, int64_t size, Curve curve) {
  float values[kBlock];
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    load(data + start, values, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) values[i] *= curve.at(values[i]).value;
    save(values, out + start, count);
  }
}

VECTORIZED void forward_range(const Normal& s, const Tensors& in, const Tensors& out, int64_t begin, int64_t count) {
  IN_TYPE(in[0].type, curve_loop(in[0].as<const T>() + begin, out[0].as<T>() + begin, count, s));
}
VECTORIZED void forward_range(const Sigmoid& s, const Tensors& in, const Tensors& out, int64_t begin, int64_t count) {
  IN_TYPE(in[0].type, curve_loop(in[0].as<const T>() + begin, out[0].as<T>() + begin, count, s));
}

template <class T, class Curve>
INLINED void curve_gradient(const T* out_grad, const T* data, T* data_grad, int64_t size, Curve curve) {
  float values[kBlock], grads[kBlock];
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t count = std::min(kBlock, size - start);
    load(data + start, values, count);
    load(out_grad + start, grads, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const Factor factor = curve.at(values[i]);
      grads[i] *= factor.value + values[i] * factor.slope;
    }
    save(grads, data_grad + start, count);
  }
}

VECTORIZED void backward_range(const Normal& s, const Tensors& in, const Tensors& out, int64_t begin, int64_t count) {
  IN_TYPE(in[0].type,
          curve_gradient(in[0].as<const T>() + begin, in[1].as<const T>() + begin, out[0].as<T>() + begin, count, s));
}
VECTORIZED void backward_range(const Sigmoid& s, const Tensors& in, const Tensors& out, int64_t begin, int64_t count) {
  IN_TYPE(in[0].type,
          curve_gradient(in[0].as<const T>() + begin, in[1].as<const T>() + begin, out[0].as<T>() + begin, count, s));
}

// Hard swish, x * (clip(x + shift, a_min, a_max) / divisor), as MXNet's operators compute it one after the other.
struct Gate {
  explicit Gate(const Attributes& attributes)
      : shift(attributes.real("shift")),
        low(attributes.real("a_min")),
        high(attributes.real("a_max")),
        divisor(attributes.real("divisor")) {}
  INLINED float at(float value) const {
    const float moved = value + shift;
    const float risen = moved < low ? low : moved;
    return (risen > high ? high : risen) / divisor;
  }
  static constexpr int64_t kRange = 32768;
  float shift, low, high, divisor;
};

template <class T>
INLINED void swish_loop(const T* data, T* out, int64_t count, Gate s) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]);
    store(value * s.at(value), &out[i]);
  }
}

VECTORIZED void forward_range(const Gate& s, const Tensors& in, const Tensors& out, int64_t begin, int64_t count) {
  IN_TYPE(in[0].type, swish_loop(in[0].as<const T>() + begin, out[0].as<T>() + begin, count, s));
}

template <class T>
INLINED void swish_gradient(const T* out_grad, const T* data, T* data_grad, int64_t count, Gate s) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float value = to_float(data[i]), grad = to_float(out_grad[i]), moved = value + s.shift;
    const float through = (moved < s.low) | (moved > s.high) ? 0.f : grad * value / s.divisor;
    store(grad * s.at(value) + through, &data_grad[i]);
  }
}

VECTORIZED void backward_range(const Gate& s, const Tensors& in, const Tensors& out, int64_t begin, int64_t count) {
  IN_TYPE(in[0].type,
          swish_gradient(in[0].as<const T>() + begin, in[1].as<const T>() + begin, out[0].as<T>() + begin, count, s));
}

}  // namespace

const Operator clip = Pointwise<Limits>::named("_gluon_amp_clip");
const Operator gelu = Pointwise<Normal>::named("_gluon_amp_gelu");
const Operator swish = Pointwise<Sigmoid>::named("_gluon_amp_swish");
const Operator hard_swish = Pointwise<Gate>::named("_gluon_amp_hard_swish");

}  // namespace gluon_amp
