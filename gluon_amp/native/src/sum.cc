// Sums over one axis in float32, as MXNet's sum computes them. MXNet's own goes through memory in the order of the
// results: over another axis than the last it takes ten times as long as memory does.
#include <algorithm>

#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768, kTile = 512;

// What lies before the axis, along it, and behind it.
struct Sizes {
  int64_t outer = 1, count = 1, inner = 1;
};

int axis_of(const Attributes& attributes, size_t ndim) {
  const std::vector<double> axes = attributes.numbers("axis");
  const int given = axes.size() == 1 ? static_cast<int>(axes[0]) : static_cast<int>(ndim);
  const int axis = given < 0 ? given + static_cast<int>(ndim) : given;
  if (axis < 0 || axis >= static_cast<int>(ndim))
    fail("expected one axis of data of ", ndim, " axes, received axis=", attributes.text("axis"));
  return axis;
}

Sizes sizes_of(const Attributes& attributes, const Tensor& data) {
  const int axis = axis_of(attributes, data.ndim);
  Sizes sizes;
  for (int i = 0; i < axis; ++i) sizes.outer *= data.dim(i);
  sizes.count = data.dim(axis);
  for (int i = axis + 1; i < data.ndim; ++i) sizes.inner *= data.dim(i);
  return sizes;
}

// Add up `count` rows of `width` values that are `stride` apart.
VECTORIZED void forward_kernel(const float* data, float* out, int64_t count, int64_t stride, int64_t width) {
  double sums[kTile];
  std::fill_n(sums, width, 0.0);
  for (int64_t row = 0; row < count; ++row, data += stride) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) sums[i] += data[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) out[i] = static_cast<float>(sums[i]);
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Sizes s = sizes_of(attributes, inputs[0]);
  const int64_t tiles = (s.inner + kTile - 1) / kTile, work = std::max<int64_t>(1, s.count * std::min(s.inner, kTile));
  parallel_ranges(s.outer * tiles, std::max<int64_t>(1, kRange / work), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t block = part / tiles, first = part % tiles * kTile;
      forward_kernel(inputs[0].as<const float>() + block * s.count * s.inner + first,
                     outputs[0].as<float>() + block * s.inner + first, s.count, s.inner,
                     std::min(kTile, s.inner - first));
    }
  });
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Sizes s = sizes_of(attributes, inputs[1]);
  parallel_ranges(s.outer * s.count, std::max<int64_t>(1, kRange / std::max<int64_t>(1, s.inner)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row)
                      std::copy_n(inputs[0].as<const float>() + row / s.count * s.inner, s.inner,
                                  outputs[0].as<float>() + row * s.inner);
                  });
}

void types(const Attributes&, Types& inputs, Types& outputs) {
  expect_type(inputs[0], kFloat32, "data");
  outputs[0] = kFloat32;
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

Arity arity(const Attributes&) { return {1, 1}; }

}  // namespace

const Operator sum_op{"_gluon_amp_sum", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
