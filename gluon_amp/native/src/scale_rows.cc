// A tensor times one number for every row, as MXNet's broadcast_mul of (N, C, H, W) and (N, C, 1, 1) computes it: the
// rows are what lies behind the last axis along which there is more than one factor. Factors are float32. With
// factors_first=True they are the first input.
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

// Which input is which.
struct Roles {
  int data, factors;
};

Roles roles(const Attributes& attributes) {
  const int data = attributes.flag("factors_first", false);
  return {data, 1 - data};
}

template <class T>
void forward_as(const Tensor& data, const Tensor& factors, const Tensor& out) {
  for_rows(data, factors, [&](int64_t first, int64_t rows, int64_t width) {
    forward_kernel(data.as<const T>() + first * width, factors.as<float>() + first, out.as<T>() + first * width, rows,
                   width);
  });
}

template <class T>
void backward_as(const Tensor& out_grad, const Tensor& data, const Tensor& factors, const Tensor& data_grad,
                 const Tensor& factor_grads) {
  for_rows(data, factors, [&](int64_t first, int64_t rows, int64_t width) {
    backward_kernel(out_grad.as<const T>() + first * width, data.as<const T>() + first * width,
                    factors.as<float>() + first, data_grad.as<T>() + first * width, factor_grads.as<float>() + first,
                    rows, width);
  });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Roles r = roles(attributes);
  const Tensor &data = inputs[r.data], &factors = inputs[r.factors];
  (data.type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(data, factors, outputs[0]);
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Roles r = roles(attributes);
  const Tensor &data = inputs[1 + r.data], &factors = inputs[1 + r.factors];
  (data.type == kBfloat16 ? backward_as<bfloat16> : backward_as<float>)(inputs[0], data, factors, outputs[r.data],
                                                                        outputs[r.factors]);
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  const Roles r = roles(attributes);
  outputs[0] = inputs[r.data] = data_type(inputs[r.data], "data");
  expect_type(inputs[r.factors], kFloat32, "the factors");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  const Roles r = roles(attributes);
  const Shape &data = inputs[r.data], &factors = inputs[r.factors];
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
