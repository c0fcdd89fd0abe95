// Layer normalization along the last axis, as MXNet's LayerNorm computes it. Statistics, gamma and beta are float32.
// Backward computes the statistics again: a row stays in the fastest cache, and no arrays for them have to be made.
#include <algorithm>
#include <memory>

#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

struct Statistics {
  float mean, inverse_deviation;
};

template <class T>
INLINED Statistics statistics_of(const T* row, int64_t width, float eps) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) sum += to_float(row[i]);
  const float mean = sum / static_cast<float>(width);
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) {
    const float distance = to_float(row[i]) - mean;
    squares += distance * distance;
  }
  return {mean, 1 / __builtin_sqrtf(squares / static_cast<float>(width) + eps)};
}

template <class T>
INLINED void forward_rows(const T* data, const float* gamma, const float* beta, T* out, int64_t rows, int64_t width,
                          float eps) {
  for (const T* end = data + rows * width; data != end; data += width, out += width) {
    const Statistics row = statistics_of(data, width, eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      store((to_float(data[i]) - row.mean) * row.inverse_deviation * gamma[i] + beta[i], &out[i]);
  }
}

// The gradients of gamma and beta are added to what is there.
template <class T>
INLINED void backward_rows(const T* out_grad, const T* data, const float* gamma, T* data_grad, float* gamma_grad,
                           float* beta_grad, int64_t rows, int64_t width, float eps) {
  for (const T* end = data + rows * width; data != end; data += width, out_grad += width, data_grad += width) {
    const Statistics row = statistics_of(data, width, eps);
    float sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t i = 0; i < width; ++i) {
      const float normalized = (to_float(data[i]) - row.mean) * row.inverse_deviation;
      const float grad = to_float(out_grad[i]);
      gamma_grad[i] += grad * normalized;
      beta_grad[i] += grad;
      sum += grad * gamma[i];
      product += grad * gamma[i] * normalized;
    }
    sum /= static_cast<float>(width);
    product /= static_cast<float>(width);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float normalized = (to_float(data[i]) - row.mean) * row.inverse_deviation;
      store((to_float(out_grad[i]) * gamma[i] - sum - normalized * product) * row.inverse_deviation, &data_grad[i]);
    }
  }
}

#define KERNELS(T)                                                                                               \
  VECTORIZED void forward_kernel(const T* data, const float* gamma, const float* beta, T* out, int64_t rows,     \
                                 int64_t width, float eps) {                                                     \
    forward_rows(data, gamma, beta, out, rows, width, eps);                                                      \
  }                                                                                                              \
  VECTORIZED void backward_kernel(const T* out_grad, const T* data, const float* gamma, T* data_grad,            \
                                  float* gamma_grad, float* beta_grad, int64_t rows, int64_t width, float eps) { \
    backward_rows(out_grad, data, gamma, data_grad, gamma_grad, beta_grad, rows, width, eps);                    \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

struct Rows {
  explicit Rows(const Tensor& data)
      : width(data.dim(-1)),
        count(width ? data.size() / width : 0),
        at_once(std::min<int64_t>(64, std::max<int64_t>(8, 16384 / std::max<int64_t>(width, 1)))) {}
  int64_t width, count, at_once;
};

float epsilon(const Attributes& attributes) { return static_cast<float>(attributes.number("eps", 1e-5)); }

template <class T>
void forward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Rows rows(inputs[0]);
  const float eps = epsilon(attributes);
  parallel_ranges(rows.count, rows.at_once, [&](int64_t begin, int64_t end) {
    forward_kernel(inputs[0].as<const T>() + begin * rows.width, inputs[1].as<float>(), inputs[2].as<float>(),
                   outputs[0].as<T>() + begin * rows.width, end - begin, rows.width, eps);
  });
}

// Add up what the ranges of rows gave: in double precision and always in the same order.
void add_up(const float* parts, int64_t count, int64_t width, float* sums) {
  constexpr int64_t kColumns = 256;
  parallel_ranges(width, kColumns, [&](int64_t begin, int64_t end) {
    double totals[kColumns] = {};
    for (int64_t part = 0; part < count; ++part)
      for (int64_t i = begin; i < end; ++i) totals[i - begin] += parts[part * 2 * width + i];
    for (int64_t i = begin; i < end; ++i) sums[i] = static_cast<float>(totals[i - begin]);
  });
}

template <class T>
void backward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &out_grad = inputs[0], &data = inputs[1], &gamma = inputs[2];
  const Rows rows(data);
  const float eps = epsilon(attributes);
  const int64_t ranges = (rows.count + rows.at_once - 1) / rows.at_once;
  // For each range of rows the gradients of gamma, then those of beta.
  const std::unique_ptr<float[]> parts(new float[ranges * 2 * rows.width]);
  parallel_ranges(rows.count, rows.at_once, [&](int64_t begin, int64_t end) {
    const int64_t offset = begin * rows.width;
    float* part = &parts[begin / rows.at_once * 2 * rows.width];
    std::fill_n(part, 2 * rows.width, 0.f);
    backward_kernel(out_grad.as<const T>() + offset, data.as<const T>() + offset, gamma.as<float>(),
                    outputs[0].as<T>() + offset, part, part + rows.width, end - begin, rows.width, eps);
  });
  add_up(parts.get(), ranges, rows.width, outputs[1].as<float>());
  add_up(parts.get() + rows.width, ranges, rows.width, outputs[2].as<float>());
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[0].type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(attributes, inputs, outputs);
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[1].type == kBfloat16 ? backward_as<bfloat16> : backward_as<float>)(attributes, inputs, outputs);
}

void types(const Attributes&, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "data");
  expect_type(inputs[1], kFloat32, "gamma");
  expect_type(inputs[2], kFloat32, "beta");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  epsilon(attributes);  // for errors at the call, not when it is run
  expect_known(inputs[0], "data");
  const int axis = attributes.integer("axis", -1), last = static_cast<int>(inputs[0].size()) - 1;
  if (axis != -1 && axis != last) fail("expected the last axis, received axis=", axis, " of ", last + 1);
  expect_shape(inputs[1], {inputs[0].back()}, "gamma");
  expect_shape(inputs[2], {inputs[0].back()}, "beta");
  outputs[0] = inputs[0];
}

Arity arity(const Attributes&) { return {3, 1}; }

}  // namespace

const Operator layer_norm{"_gluon_amp_layer_norm", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
