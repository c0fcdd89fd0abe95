// Dense layers, as MXNet's FullyConnected computes them. Weight and bias are float32; the product takes the type of the
// data, for which the weight is rounded at every call: less memory is read than for a second weight that is kept.
#include <algorithm>
#include <functional>
#include <numeric>

#include "families.h"
#include "operator.h"
#include "product.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768;

VECTORIZED void round_kernel(const float* values, bfloat16* rounded, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(values[i], &rounded[i]);
}

// Return a matrix of float32 in the type of the data. The memory belongs to the thread, until its next call.
Matrices in_type(const Matrices& matrix, int type) {
  if (type == kFloat32) return matrix;
  thread_local std::vector<bfloat16> rounded;
  const int64_t values = matrix.rows() * matrix.columns();
  if (static_cast<int64_t>(rounded.size()) < values) rounded.resize(values);
  bfloat16* target = rounded.data();
  parallel_ranges(values, kRange, [&](int64_t begin, int64_t end) {
    round_kernel(static_cast<const float*>(matrix.data) + begin, target + begin, end - begin);
  });
  return {target, type, matrix.dims, matrix.strides};
}

constexpr int64_t kColumns = 64, kRows = 64;  // of what is added up in float32

template <class T>
INLINED void add_rows(const T* values, int64_t rows, int64_t width, int64_t columns, float* sums) {
  for (int64_t row = 0; row < rows; ++row, values += width) {
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) sums[i] += to_float(values[i]);
  }
}

#define KERNEL(T)                                                                                            \
  VECTORIZED void add_rows_kernel(const T* values, int64_t rows, int64_t width, int64_t columns, float* sums) { \
    add_rows(values, rows, width, columns, sums);                                                            \
  }
KERNEL(float)
KERNEL(bfloat16)
#undef KERNEL

// Add up the rows of a matrix; blocks of them in double precision.
template <class T>
void sum_rows(const Matrices& matrix, float* sums) {
  const int64_t rows = matrix.rows(), width = matrix.columns();
  parallel_ranges(width, kColumns, [&](int64_t begin, int64_t end) {
    double totals[kColumns] = {};
    for (int64_t row = 0; row < rows; row += kRows) {
      float parts[kColumns] = {};
      add_rows_kernel(static_cast<const T*>(matrix.data) + row * width + begin, std::min(kRows, rows - row), width,
                      end - begin, parts);
      for (int64_t i = begin; i < end; ++i) totals[i - begin] += parts[i - begin];
    }
    for (int64_t i = begin; i < end; ++i) sums[i] = static_cast<float>(totals[i - begin]);
  });
}

// The data of a layer, or what it gives, as one matrix.
Matrices as_matrix(const Tensor& tensor, int64_t columns) {
  const int64_t rows = columns ? tensor.size() / columns : 0;
  return {tensor.data, tensor.type, {rows, columns}, {columns, 1}};
}

Matrices weight_of(const Tensor& tensor) { return as_matrix(tensor, tensor.dim(1)); }

void forward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[0], &weight = inputs[1];
  const Matrices out = as_matrix(outputs[0], weight.dim(0));
  if (!out.rows()) return;
  multiply(as_matrix(data, weight.dim(1)), in_type(weight_of(weight), data.type).transposed(), out, 1,
           inputs.size() > 2 ? inputs[2].as<float>() : nullptr);
}

void backward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[1], &weight = inputs[2];
  const Matrices grad = as_matrix(inputs[0], weight.dim(0)), rows = as_matrix(data, weight.dim(1));
  if (rows.rows()) multiply(grad, in_type(weight_of(weight), data.type), as_matrix(outputs[0], weight.dim(1)));
  multiply(grad.transposed(), rows, weight_of(outputs[1]));
  if (outputs.size() > 2)
    (data.type == kBfloat16 ? sum_rows<bfloat16> : sum_rows<float>)(grad, outputs[2].as<float>());
}

struct Settings {
  explicit Settings(const Attributes& attributes)
      : units(static_cast<uint32_t>(attributes.number("num_hidden"))),
        is_biased(!attributes.flag("no_bias", false)),
        flattens(attributes.flag("flatten", true)) {}
  uint32_t units;
  bool is_biased, flattens;
};

void types(const Attributes&, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "data");
  expect_type(inputs[1], kFloat32, "weight");
  if (inputs.size() > 2) expect_type(inputs[2], kFloat32, "bias");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  onednn::functions();  // for errors at the call, not when it is run
  const Settings s(attributes);
  const Shape& data = inputs[0];
  expect_known(data, "data");
  if (data.size() < 2) fail("expected two dimensions or more, received data of shape ", describe(data));
  const uint32_t width = s.flattens ? std::accumulate(data.begin() + 1, data.end(), 1u, std::multiplies<uint32_t>())
                                    : data.back();
  expect_shape(inputs[1], {s.units, width}, "weight");
  if (s.is_biased) expect_shape(inputs[2], {s.units}, "bias");
  outputs[0] = s.flattens ? Shape{data[0], s.units} : data;
  outputs[0].back() = s.units;
}

Arity arity(const Attributes& attributes) { return {Settings(attributes).is_biased ? 3 : 2, 1}; }

}  // namespace

const Operator dense{"_gluon_amp_dense", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
