// Sums and means over one axis or over all in float32, as MXNet's sum and mean compute them. MXNet follows each result
// through memory by one thread: over another axis than the last that takes ten times as long as memory does.
#include <algorithm>
#include <numeric>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768, kColumns = 512;

bool has_all_axes(const Attributes& attributes) {
  return attributes.text("axis", "None") == "None" || attributes.numbers("axis").empty();
}

int axis_of(const Attributes& attributes, size_t ndim) {
  const std::vector<double> axes = attributes.numbers("axis");
  const int given = axes.size() == 1 ? static_cast<int>(axes[0]) : static_cast<int>(ndim);
  const int axis = given < 0 ? given + static_cast<int>(ndim) : given;
  if (axis < 0 || axis >= static_cast<int>(ndim))
    fail("expected one axis of data of ", ndim, " axes, or all, received axis=", attributes.text("axis"));
  return axis;
}

// The values of a result, and how far apart they are.
struct Column {
  Column(const Attributes& attributes, const Tensor& data) {
    if (has_all_axes(attributes)) return;
    const int axis = axis_of(attributes, data.ndim);
    length = data.dim(axis), distance = values_behind(data, axis);
  }
  int64_t length = 0, distance = 0;  // 0 where all values are one column
};

VECTORIZED double sum_range(const float* data, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += data[i];
  return sum;
}

VECTORIZED void sum_columns(const float* data, float* out, const Column& column, int64_t columns, double divisor) {
  double sums[kColumns];
  std::fill_n(sums, columns, 0.0);
  for (int64_t row = 0; row < column.length; ++row, data += column.distance) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += data[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) out[i] = static_cast<float>(sums[i] / divisor);
}

VECTORIZED void divide(const float* values, int64_t step, float* out, int64_t count, float divisor) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = values[i * step] / divisor;
}

template <bool kIsMean>
void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[0], &out = outputs[0];
  if (!out.size()) return;
  const Column column(attributes, data);
  const float* values = data.as<const float>();
  if (!column.distance) {
    std::vector<double> sums((data.size() + kRange - 1) / kRange);
    parallel_ranges(data.size(), kRange,
                    [&](int64_t begin, int64_t end) { sums[begin / kRange] = sum_range(values + begin, end - begin); });
    const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    *out.as<float>() = static_cast<float>(kIsMean ? sum / data.size() : sum);
    return;
  }
  if (!column.length) clear(out);
  for_columns(data, column.length, column.distance, kColumns, kRange, [&](int64_t first, int64_t columns) {
    const int64_t slice = first / (column.length * column.distance);
    sum_columns(values + first, out.as<float>() + slice * column.distance + first % column.distance, column, columns,
                kIsMean ? column.length : 1);
  });
}

template <bool kIsMean>
void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &out_grad = inputs[0], &data = inputs[1];
  if (!data.size()) return;
  const Column column(attributes, data);
  const int64_t length = column.distance ? column.length : data.size();
  const int64_t width = column.distance ? column.distance : kRange;
  for_pieces((data.size() + width - 1) / width, width, kRange, [&](int64_t row) {
    const int64_t begin = row * width, step = column.distance ? 1 : 0;
    divide(out_grad.as<const float>() + step * (row / length * width), step, outputs[0].as<float>() + begin,
           std::min(width, data.size() - begin), kIsMean ? length : 1);
  });
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  expect_known(inputs[0], "data");
  outputs[0] = inputs[0];
  const bool keeps = attributes.flag("keepdims", false);
  if (has_all_axes(attributes)) {
    outputs[0].assign(keeps ? inputs[0].size() : 1, 1);
    return;
  }
  const int axis = axis_of(attributes, inputs[0].size());
  if (keeps)
    outputs[0][axis] = 1;
  else
    outputs[0].erase(outputs[0].begin() + axis);
  if (outputs[0].empty()) outputs[0] = {1};
}

}  // namespace

const Operator sum_op{"_gluon_amp_sum", takes<1>, float32_types, shapes, forward<false>, backward<false>};
const Operator mean_op{"_gluon_amp_mean", takes<1>, float32_types, shapes, forward<true>, backward<true>};

}  // namespace gluon_amp
