// Layer normalization along the last axis, as MXNet's LayerNorm computes it. Statistics, gamma and beta are float32.
// Backward computes the statistics again: a row stays in the fastest cache, and no arrays for them have to be made.
#include <algorithm>
#include <memory>

#include "operator.h"

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

VECTORIZED void forward_range(const Tensors& in, const Tensor& out, int64_t begin, int64_t rows, int64_t width,
                              float eps) {
  IN_TYPE(out.type, forward_rows(in[0].as<const T>() + begin * width, in[1].as<float>(), in[2].as<float>(),
                                 out.as<T>() + begin * width, rows, width, eps));
}
VECTORIZED void backward_range(const Tensors& in, const Tensor& data_grad, float* parts, int64_t begin, int64_t rows,
                               int64_t width, float eps) {
  IN_TYPE(data_grad.type,
          backward_rows(in[0].as<const T>() + begin * width, in[1].as<const T>() + begin * width, in[2].as<float>(),
                        data_grad.as<T>() + begin * width, parts, parts + width, rows, width, eps));
}

struct Rows {
  explicit Rows(const Tensor& data)
      : width(data.dim(-1)),
        count(width ? data.size() / width : 0),
        at_once(std::min<int64_t>(64, std::max<int64_t>(8, 16384 / std::max<int64_t>(width, 1)))) {}
  int64_t width, count, at_once;
};

float epsilon(const Attributes& attributes) { return attributes.real("eps", 1e-5); }

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Rows rows(inputs[0]);
  const float eps = epsilon(attributes);
  parallel_ranges(rows.count, rows.at_once, [&](int64_t begin, int64_t end) {
    forward_range(inputs, outputs[0], begin, end - begin, rows.width, eps);
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

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Rows rows(inputs[1]);
  const float eps = epsilon(attributes);
  const int64_t ranges = (rows.count + rows.at_once - 1) / rows.at_once;
  // For each range of rows the gradients of gamma, then those of beta.
  const std::unique_ptr<float[]> parts(new float[ranges * 2 * rows.width]);
  parallel_ranges(rows.count, rows.at_once, [&](int64_t begin, int64_t end) {
    float* part = &parts[begin / rows.at_once * 2 * rows.width];
    std::fill_n(part, 2 * rows.width, 0.f);
    backward_range(inputs, outputs[0], part, begin, end - begin, rows.width, eps);
  });
  add_up(parts.get(), ranges, rows.width, outputs[1].as<float>());
  add_up(parts.get() + rows.width, ranges, rows.width, outputs[2].as<float>());
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  data_types(attributes, inputs, outputs);
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

}  // namespace

const Operator layer_norm{"_gluon_amp_layer_norm", takes<3>, types, shapes, forward, backward};

}  // namespace gluon_amp
