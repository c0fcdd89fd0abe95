// A tensor times one number for every row, as MXNet's broadcast_mul of (N, C, H, W) and (N, C, 1, 1) computes it: the
// rows are what lies behind the last axis along which there is more than one factor. Factors are float32.
#include <algorithm>

#include "families.h"
#include "operator.h"
#include "vector.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768;

template <class T>
INLINED void forward_rows(const T* data, const float* factors, T* out, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, data += width, out += width) {
    const float factor = factors[row];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) store(to_float(data[i]) * factor, &out[i]);
  }
}

template <class T>
INLINED void backward_rows(const T* out_grad, const T* data, const float* factors, T* data_grad, float* factor_grads,
                           int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, data += width, out_grad += width, data_grad += width) {
    const float factor = factors[row];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) {
      sum += to_float(out_grad[i]) * to_float(data[i]);
      store(to_float(out_grad[i]) * factor, &data_grad[i]);
    }
    factor_grads[row] = sum;
  }
}

#define KERNELS(T)                                                                                           \
  VECTORIZED void forward_kernel(const T* data, const float* factors, T* out, int64_t rows, int64_t width) { \
    forward_rows(data, factors, out, rows, width);                                                           \
  }                                                                                                          \
  VECTORIZED void backward_kernel(const T* out_grad, const T* data, const float* factors, T* data_grad,      \
                                  float* factor_grads, int64_t rows, int64_t width) {                        \
    backward_rows(out_grad, data, factors, data_grad, factor_grads, rows, width);                            \
  }
KERNELS(float)
KERNELS(bfloat16)
#undef KERNELS

// Run a function for ranges of rows, on all threads, with their width.
template <class Run>
void for_rows(const Tensor& data, const Tensor& factors, const Run& run) {
  const int64_t rows = factors.size(), width = rows ? data.size() / rows : 0;
  parallel_ranges(rows, std::max<int64_t>(1, kRange / std::max<int64_t>(1, width)),
                  [&](int64_t begin, int64_t end) { run(begin, end - begin, width); });
}

template <class T>
void forward_as(const Tensors& inputs, const Tensors& outputs) {
  for_rows(inputs[0], inputs[1], [&](int64_t first, int64_t rows, int64_t width) {
    forward_kernel(inputs[0].as<const T>() + first * width, inputs[1].as<float>() + first,
                   outputs[0].as<T>() + first * width, rows, width);
  });
}

template <class T>
void backward_as(const Tensors& inputs, const Tensors& outputs) {
  for_rows(inputs[1], inputs[2], [&](int64_t first, int64_t rows, int64_t width) {
    backward_kernel(inputs[0].as<const T>() + first * width, inputs[1].as<const T>() + first * width,
                    inputs[2].as<float>() + first, outputs[0].as<T>() + first * width, outputs[1].as<float>() + first,
                    rows, width);
  });
}

void forward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  (inputs[0].type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(inputs, outputs);
}

void backward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  (inputs[1].type == kBfloat16 ? backward_as<bfloat16> : backward_as<float>)(inputs, outputs);
}

void types(const Attributes&, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "data");
  expect_type(inputs[1], kFloat32, "the factors");
}

void shapes(const Attributes&, Shapes& inputs, Shapes& outputs) {
  const Shape &data = inputs[0], &factors = inputs[1];
  expect_known(data, "data");
  expect_known(factors, "the factors");
  const auto last = std::find_if(factors.rbegin(), factors.rend(), [](uint32_t size) { return size != 1; }).base();
  if (data.size() != factors.size() || !std::equal(factors.begin(), last, data.begin()))
    fail("expected factors of the data's leading dimensions and 1 behind them, received data of shape ", describe(data),
         " and factors of shape ", describe(factors));
  outputs[0] = data;
}

Arity arity(const Attributes&) { return {2, 1}; }

}  // namespace

const Operator scale_rows{"_gluon_amp_scale_rows", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
