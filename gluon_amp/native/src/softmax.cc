// Softmax and its logarithm over an axis, as MXNet computes them, with a temperature and, over the last axis, with
// lengths of rows: what is behind a row's length is 0 and has no gradient.
#include "softmax.h"

#include <algorithm>
#include <cmath>

#include "columns.h"
#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

// Rows of so many values at a time.
constexpr int64_t kRange = 16384;

// The logarithm of the softmax of values in float32.
template <class T>
INLINED void log_softmax(const float* values, T* out, int64_t length) {
  const float most = largest(values, length);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < length; ++i) sum += exp_of_negative(values[i] - most);
  const float subtracted = std::log(sum);
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) store(values[i] - most - subtracted, &out[i]);
}

// A row's values in float32: the row itself, or in memory that is given.
INLINED const float* as_floats(const float* data, float*, int64_t) { return data; }
INLINED const float* as_floats(const bfloat16* data, float* values, int64_t length) {
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) values[i] = to_float(data[i]);
  return values;
}

// Take the largest value away, which leaves less to round, and divide; the results may take the values' place.
INLINED void divide(const float* values, float* results, int64_t length, float temperature) {
  const float most = largest(values, length);
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) results[i] = (values[i] - most) / temperature;
}

template <class T>
INLINED void forward_row(const T* data, T* out, float* values, int64_t length, int64_t width, float temperature,
                         bool is_log) {
  const float* scores = as_floats(data, values, length);
  if (temperature != 1) {
    divide(scores, values, length, temperature);
    scores = values;
  }
  if (is_log)
    log_softmax(scores, out, length);
  else {
    softmax(scores, values, length, length);
#pragma omp simd
    for (int64_t i = 0; i < length; ++i) store(values[i], &out[i]);
  }
  std::fill(out + length, out + width, T{});
}

template <class T>
INLINED void backward_row(const T* out_grad, const T* out, T* data_grad, int64_t length, int64_t width, float factor,
                          bool is_log) {
  float sum = 0;
  if (is_log) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < length; ++i) sum += to_float(out_grad[i]);
#pragma omp simd
    for (int64_t i = 0; i < length; ++i)
      store((to_float(out_grad[i]) - exp_of_negative(to_float(out[i])) * sum) * factor, &data_grad[i]);
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < length; ++i) sum += to_float(out_grad[i]) * to_float(out[i]);
#pragma omp simd
    for (int64_t i = 0; i < length; ++i)
      store(to_float(out[i]) * (to_float(out_grad[i]) - sum) * factor, &data_grad[i]);
  }
  std::fill(data_grad + length, data_grad + width, T{});
}

// What lies along an axis before the last one: so many values, at a distance, of some columns.
constexpr int64_t kColumns = 64;

template <class T>
INLINED void forward_columns(const T* data, T* out, int64_t length, int64_t distance, int64_t columns,
                             float temperature, bool is_log) {
  float most[kColumns], sums[kColumns];
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) {
    most[i] = -std::numeric_limits<float>::infinity();
    sums[i] = 0;
  }
  for (int64_t row = 0; row < length; ++row)
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const float value = to_float(data[row * distance + i]);
      most[i] = value > most[i] ? value : most[i];
    }
  for (int64_t row = 0; row < length; ++row)
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i)
      sums[i] += exp_of_negative((to_float(data[row * distance + i]) - most[i]) / temperature);
  for (int64_t i = 0; i < columns; ++i) sums[i] = is_log ? std::log(sums[i]) : 1 / sums[i];
  for (int64_t row = 0; row < length; ++row)
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const float value = (to_float(data[row * distance + i]) - most[i]) / temperature;
      store(is_log ? value - sums[i] : exp_of_negative(value) * sums[i], &out[row * distance + i]);
    }
}

template <class T>
INLINED void backward_columns(const T* out_grad, const T* out, T* data_grad, int64_t length, int64_t distance,
                              int64_t columns, float factor, bool is_log) {
  float sums[kColumns] = {};
  for (int64_t row = 0; row < length; ++row)
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const float grad = to_float(out_grad[row * distance + i]);
      sums[i] += is_log ? grad : grad * to_float(out[row * distance + i]);
    }
  for (int64_t row = 0; row < length; ++row)
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const float grad = to_float(out_grad[row * distance + i]), result = to_float(out[row * distance + i]);
      store((is_log ? grad - exp_of_negative(result) * sums[i] : result * (grad - sums[i])) * factor,
            &data_grad[row * distance + i]);
    }
}

#define KERNELS(T)                                                                                                 \
  VECTORIZED void forward_kernel(const T* data, T* out, float* values, int64_t length, int64_t width,              \
                                 float temperature, bool is_log) {                                                 \
    forward_row(data, out, values, length, width, temperature, is_log);                                            \
  }                                                                                                                \
  VECTORIZED void backward_kernel(const T* out_grad, const T* out, T* data_grad, int64_t length, int64_t width,    \
                                  float factor, bool is_log) {                                                     \
    backward_row(out_grad, out, data_grad, length, width, factor, is_log);                                         \
  }                                                                                                                \
  VECTORIZED void forward_columns_kernel(const T* data, T* out, int64_t length, int64_t distance, int64_t columns, \
                                         float temperature, bool is_log) {                                         \
    forward_columns(data, out, length, distance, columns, temperature, is_log);                                    \
  }                                                                                                                \
  VECTORIZED void backward_columns_kernel(const T* out_grad, const T* out, T* data_grad, int64_t length,           \
                                          int64_t distance, int64_t columns, float factor, bool is_log) {          \
    backward_columns(out_grad, out, data_grad, length, distance, columns, factor, is_log);                         \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

struct Settings {
  explicit Settings(const Attributes& attributes)
      : has_lengths(attributes.flag("use_length", false)),
        temperature(static_cast<float>(attributes.number("temperature", 1))),
        axis(attributes.integer("axis", -1)) {
    if (!(temperature > 0)) fail("expected a temperature above 0, received temperature=", temperature);
    if (has_lengths && axis != -1) fail("expected axis=-1 with lengths, received axis=", axis);
  }
  bool has_lengths;
  float temperature;
  int axis;
};

// How many values of each row count.
struct Lengths {
  Lengths(const Settings& s, const Tensors& tensors, int first)
      : values(s.has_lengths ? tensors[first + 1].as<const int32_t>() : nullptr) {}
  int64_t of(int64_t row, int64_t width) const {
    return values ? std::min<int64_t>(std::max(values[row], 0), width) : width;
  }
  const int32_t* values;
};

// Run a function for every row, on all threads.
template <class Run>
void for_rows(const Tensor& data, int axis, const Run& run) {
  const int64_t width = data.dim(axis), rows = width ? data.size() / width : 0;
  parallel_ranges(rows, std::max<int64_t>(1, width ? kRange / width : 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) run(row, width);
  });
}

struct Values {};

template <class T, bool is_log>
void forward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const int64_t distance = values_behind(inputs[0], s.axis);
  if (distance != 1) {
    const int64_t length = inputs[0].dim(s.axis);
    for_columns(inputs[0], length, distance, kColumns, kRange, [&](int64_t first, int64_t columns) {
      forward_columns_kernel(inputs[0].as<const T>() + first, outputs[0].as<T>() + first, length, distance, columns,
                             s.temperature, is_log);
    });
    return;
  }
  const Lengths lengths(s, inputs, 0);
  for_rows(inputs[0], s.axis, [&](int64_t row, int64_t width) {
    const auto values = static_cast<float*>(scratch<Values>(width * sizeof(float)));
    forward_kernel(inputs[0].as<const T>() + row * width, outputs[0].as<T>() + row * width, values,
                   lengths.of(row, width), width, s.temperature, is_log);
  });
}

template <class T, bool is_log>
void backward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor& out = inputs.back();
  const int64_t distance = values_behind(out, s.axis);
  if (distance != 1) {
    const int64_t length = out.dim(s.axis);
    for_columns(out, length, distance, kColumns, kRange, [&](int64_t first, int64_t columns) {
      backward_columns_kernel(inputs[0].as<const T>() + first, out.as<const T>() + first, outputs[0].as<T>() + first,
                              length, distance, columns, 1 / s.temperature, is_log);
    });
    return;
  }
  const Lengths lengths(s, inputs, 1);
  for_rows(out, s.axis, [&](int64_t row, int64_t width) {
    backward_kernel(inputs[0].as<const T>() + row * width, out.as<const T>() + row * width,
                    outputs[0].as<T>() + row * width, lengths.of(row, width), width, 1 / s.temperature, is_log);
  });
  if (s.has_lengths) std::fill_n(outputs[1].as<int32_t>(), outputs[1].size(), 0);
}

template <bool is_log>
void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[0].type == kBfloat16 ? forward_as<bfloat16, is_log> : forward_as<float, is_log>)(attributes, inputs, outputs);
}

template <bool is_log>
void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  (inputs[1].type == kBfloat16 ? backward_as<bfloat16, is_log> : backward_as<float, is_log>)(attributes, inputs,
                                                                                             outputs);
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "data");
  if (Settings(attributes).has_lengths) expect_type(inputs[1], kInt32, "the lengths");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  const Settings s(attributes);
  expect_known(inputs[0], "data");
  const int axes = static_cast<int>(inputs[0].size());
  if (s.axis < -axes || s.axis >= axes) fail("expected an axis of the data, received axis=", s.axis, " for ", axes);
  if (s.has_lengths) expect_shape(inputs[1], Shape(inputs[0].begin(), inputs[0].end() - 1), "the lengths");
  outputs[0] = inputs[0];
}

Arity arity(const Attributes& attributes) { return {Settings(attributes).has_lengths ? 2 : 1, 1}; }

}  // namespace

const Operator softmax_op{"_gluon_amp_softmax", arity, types, shapes, forward<false>, backward<false>};
const Operator log_softmax_op{"_gluon_amp_log_softmax", arity, types, shapes, forward<true>, backward<true>};

}  // namespace gluon_amp
