// A tensor times one number for every row, as MXNet's broadcast_mul of (N, C, H, W) and (N, C, 1, 1) computes it: the
// rows are what lies behind the last axis along which there is more than one factor. Factors are float32. With
// factors_first=True they are the first input. With adds=True the last input is added, with rectifies=True what is
// below 0 then becomes 0: what MXNet keeps for backward is every output, so that the product alone is a map more.
#include <algorithm>
#include <limits>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 32768;

// A tensor that goes along with the data; its values are null where there is none.
template <class T>
INLINED T* moved(T* values, int64_t count) {
  return values ? values + count : values;
}

template <class T>
INLINED void forward_rows(const T* data, const float* factors, const T* added, bool rectifies, T* out, int64_t rows,
                          int64_t width) {
  const float least = rectifies ? 0 : -std::numeric_limits<float>::infinity();
  for (int64_t row = 0; row < rows; ++row, data += width, out += width, added = moved(added, width)) {
    const float factor = factors[row];
    if (!added) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) store(to_float(data[i]) * factor, &out[i]);
      continue;
    }
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float sum = to_float(data[i]) * factor + to_float(added[i]);
      store(sum < least ? least : sum, &out[i]);
    }
  }
}

template <class T>
INLINED void backward_rows(const T* out_grads, const T* data, const float* factors, const T* rectified, T* data_grad,
                           float* factor_grads, T* added_grad, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row, data += width, data_grad += width) {
    const float factor = factors[row];
    const T* out_grad = out_grads + row * width;
    if (added_grad && !rectified) std::copy_n(out_grad, width, added_grad);
    if (rectified) {  // no gradient passes where a result is 0
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) store(to_float(rectified[i]) > 0 ? to_float(out_grad[i]) : 0, &added_grad[i]);
      out_grad = added_grad;
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) {
      sum += to_float(out_grad[i]) * to_float(data[i]);
      store(to_float(out_grad[i]) * factor, &data_grad[i]);
    }
    factor_grads[row] = sum;
    rectified = moved(rectified, width);
    added_grad = moved(added_grad, width);
  }
}

// Which input is which, and what is done to the product.
struct Settings {
  explicit Settings(const Attributes& attributes)
      : data(attributes.flag("factors_first", false)),
        adds(attributes.flag("adds", false)),
        rectifies(attributes.flag("rectifies", false)) {}

  int data, factors = 1 - data;
  bool adds, rectifies;
};

VECTORIZED void forward_range(const Settings& s, const Tensors& in, const Tensor& out, int64_t first, int64_t rows,
                              int64_t width) {
  const int64_t begin = first * width;
  IN_TYPE(out.type,
          forward_rows(in[s.data].as<const T>() + begin, in[s.factors].as<float>() + first,
                       s.adds ? in[2].as<const T>() + begin : nullptr, s.rectifies, out.as<T>() + begin, rows, width));
}
VECTORIZED void backward_range(const Settings& s, const Tensors& in, const Tensors& out, int64_t first, int64_t rows,
                               int64_t width) {
  const int64_t begin = first * width;
  IN_TYPE(in[0].type,
          backward_rows(in[0].as<const T>() + begin, in[1 + s.data].as<const T>() + begin,
                        in[1 + s.factors].as<float>() + first, s.rectifies ? in[4].as<const T>() + begin : nullptr,
                        out[s.data].as<T>() + begin, out[s.factors].as<float>() + first,
                        s.adds ? out[2].as<T>() + begin : nullptr, rows, width));
}

// Run a function for ranges of rows, on all threads, with their width.
template <class Run>
void for_rows(const Tensor& data, const Tensor& factors, const Run& run) {
  const int64_t rows = factors.size(), width = rows ? data.size() / rows : 0;
  parallel_ranges(rows, std::max<int64_t>(1, kRange / std::max<int64_t>(1, width)),
                  [&](int64_t begin, int64_t end) { run(begin, end - begin, width); });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  for_rows(inputs[s.data], inputs[s.factors], [&](int64_t first, int64_t rows, int64_t width) {
    forward_range(s, inputs, outputs[0], first, rows, width);
  });
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  for_rows(inputs[1 + s.data], inputs[1 + s.factors],
           [&](int64_t first, int64_t rows, int64_t width) { backward_range(s, inputs, outputs, first, rows, width); });
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  const Settings s(attributes);
  outputs[0] = inputs[s.data] = data_type(inputs[s.data], "data");
  expect_type(inputs[s.factors], kFloat32, "the factors");
  if (s.adds) expect_type(inputs[2], outputs[0], "what is added");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  const Settings s(attributes);
  const Shape &data = inputs[s.data], &factors = inputs[s.factors];
  expect_known(data, "data");
  expect_known(factors, "the factors");
  const auto last = std::find_if(factors.rbegin(), factors.rend(), [](uint32_t size) { return size != 1; }).base();
  if (data.size() != factors.size() || !std::equal(factors.begin(), last, data.begin()))
    fail("expected factors of the data's leading dimensions and 1 behind them, received data of shape ", describe(data),
         " and factors of shape ", describe(factors));
  if (s.adds) expect_shape(inputs[2], data, "what is added");
  outputs[0] = data;
}

Arity arity(const Attributes& attributes) {
  const Settings s(attributes);
  if (s.rectifies && !s.adds) fail("expected adds=True with rectifies=True, received adds=False");
  return {s.adds ? 3 : 2, 1};
}

}  // namespace

const Operator scale_rows{"_gluon_amp_scale_rows", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
