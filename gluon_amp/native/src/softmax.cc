// Softmax and its logarithm over an axis, as MXNet computes them, with a temperature and, over the last axis, with
// lengths of rows: what is behind a row's length is 0 and has no gradient.
#include <algorithm>
#include <cmath>

#include "exponential.h"
#include "operator.h"

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
  float most[kColumns], sums[kColumns], loaded[kColumns];
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) {
    most[i] = -std::numeric_limits<float>::infinity();
    sums[i] = 0;
  }
  for (int64_t row = 0; row < length; ++row) {
    const float* values = as_floats(data + row * distance, loaded, columns);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) most[i] = values[i] > most[i] ? values[i] : most[i];
  }
  for (int64_t row = 0; row < length; ++row) {
    const float* values = as_floats(data + row * distance, loaded, columns);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += exp_of_negative((values[i] - most[i]) / temperature);
  }
  for (int64_t i = 0; i < columns; ++i) sums[i] = is_log ? std::log(sums[i]) : 1 / sums[i];
  for (int64_t row = 0; row < length; ++row) {
    const float* values = as_floats(data + row * distance, loaded, columns);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const float value = (values[i] - most[i]) / temperature;
      store(is_log ? value - sums[i] : exp_of_negative(value) * sums[i], &out[row * distance + i]);
    }
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

VECTORIZED void forward_columns_at(const Tensor& data, const Tensor& out, int64_t begin, int64_t length,
                                   int64_t distance, int64_t columns, float temperature, bool is_log) {
  IN_TYPE(data.type, forward_columns(data.as<const T>() + begin, out.as<T>() + begin, length, distance, columns,
                                     temperature, is_log));
}
VECTORIZED void backward_columns_at(const Tensor& out_grad, const Tensor& out, const Tensor& data_grad, int64_t begin,
                                    int64_t length, int64_t distance, int64_t columns, float factor, bool is_log) {
  IN_TYPE(out.type, backward_columns(out_grad.as<const T>() + begin, out.as<const T>() + begin,
                                     data_grad.as<T>() + begin, length, distance, columns, factor, is_log));
}

struct Settings {
  explicit Settings(const Attributes& attributes)
      : has_lengths(attributes.flag("use_length", false)),
        temperature(attributes.real("temperature", 1)),
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

VECTORIZED void forward_rows(const Settings& s, const Lengths& lengths, const Tensor& data, const Tensor& out,
                             int64_t begin, int64_t end, int64_t width, float* values, bool is_log) {
  IN_TYPE(data.type, for (int64_t row = begin; row < end; ++row)
                         forward_row(data.as<const T>() + row * width, out.as<T>() + row * width, values,
                                     lengths.of(row, width), width, s.temperature, is_log));
}
VECTORIZED void backward_rows(const Settings& s, const Lengths& lengths, const Tensor& out_grad, const Tensor& out,
                              const Tensor& data_grad, int64_t begin, int64_t end, int64_t width, bool is_log) {
  IN_TYPE(out.type, for (int64_t row = begin; row < end; ++row) backward_row(
                        out_grad.as<const T>() + row * width, out.as<const T>() + row * width,
                        data_grad.as<T>() + row * width, lengths.of(row, width), width, 1 / s.temperature, is_log));
}

// Run a function for ranges of rows, on all threads.
template <class Run>
void for_rows(const Tensor& data, int64_t width, const Run& run) {
  parallel_ranges(width ? data.size() / width : 0, std::max<int64_t>(1, width ? kRange / width : 1), run);
}

struct Values {};

template <bool is_log>
void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor &data = inputs[0], &out = outputs[0];
  const int64_t distance = values_behind(data, s.axis), length = data.dim(s.axis);
  if (distance != 1)
    return for_columns(data, length, distance, kColumns, kRange, [&](int64_t first, int64_t columns) {
      forward_columns_at(data, out, first, length, distance, columns, s.temperature, is_log);
    });
  const Lengths lengths(s, inputs, 0);
  for_rows(data, length, [&](int64_t begin, int64_t end) {
    const auto values = static_cast<float*>(scratch<Values>(length * sizeof(float)));
    forward_rows(s, lengths, data, out, begin, end, length, values, is_log);
  });
}

template <bool is_log>
void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor &out = inputs.back(), &data_grad = outputs[0];
  const int64_t distance = values_behind(out, s.axis), length = out.dim(s.axis);
  if (distance != 1)
    return for_columns(out, length, distance, kColumns, kRange, [&](int64_t first, int64_t columns) {
      backward_columns_at(inputs[0], out, data_grad, first, length, distance, columns, 1 / s.temperature, is_log);
    });
  const Lengths lengths(s, inputs, 1);
  for_rows(out, length, [&](int64_t begin, int64_t end) {
    backward_rows(s, lengths, inputs[0], out, data_grad, begin, end, length, is_log);
  });
  if (s.has_lengths) clear(outputs[1]);
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  data_types(attributes, inputs, outputs);
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
