// Sums over one axis in float32, as MXNet's sum computes them. MXNet's own goes through memory in the order of the
// results: over another axis than the last it takes ten times as long as memory does.
#include <algorithm>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768, kColumns = 512;

int axis_of(const Attributes& attributes, size_t ndim) {
  const std::vector<double> axes = attributes.numbers("axis");
  const int given = axes.size() == 1 ? static_cast<int>(axes[0]) : static_cast<int>(ndim);
  const int axis = given < 0 ? given + static_cast<int>(ndim) : given;
  if (axis < 0 || axis >= static_cast<int>(ndim))
    fail("expected one axis of data of ", ndim, " axes, received axis=", attributes.text("axis"));
  return axis;
}

VECTORIZED void forward_kernel(const float* data, float* out, int64_t length, int64_t distance, int64_t columns) {
  double sums[kColumns];
  std::fill_n(sums, columns, 0.0);
  for (int64_t row = 0; row < length; ++row, data += distance) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += data[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) out[i] = static_cast<float>(sums[i]);
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[0], &out = outputs[0];
  const int axis = axis_of(attributes, data.ndim);
  const int64_t length = data.dim(axis), distance = values_behind(data, axis);
  if (!length) clear(out);
  for_columns(data, length, distance, kColumns, kRange, [&](int64_t first, int64_t columns) {
    const int64_t slice = first / (length * distance);
    forward_kernel(data.as<const float>() + first, out.as<float>() + slice * distance + first % distance, length,
                   distance, columns);
  });
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &out_grad = inputs[0], &data = inputs[1];
  if (!data.size()) return;
  const int axis = axis_of(attributes, data.ndim);
  const int64_t length = data.dim(axis), distance = values_behind(data, axis);
  for_pieces(data.size() / distance, distance, kRange,
             [&](int64_t row) { copy(out_grad, row / length * distance, outputs[0], row * distance, distance); });
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  expect_known(inputs[0], "data");
  const int axis = axis_of(attributes, inputs[0].size());
  outputs[0] = inputs[0];
  if (attributes.flag("keepdims", false))
    outputs[0][axis] = 1;
  else
    outputs[0].erase(outputs[0].begin() + axis);
  if (outputs[0].empty()) outputs[0] = {1};
}

}  // namespace

const Operator sum_op{"_gluon_amp_sum", takes<1>, float32_types, shapes, forward, backward};

}  // namespace gluon_amp
