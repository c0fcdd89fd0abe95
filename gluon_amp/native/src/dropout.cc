// Dropout, as MXNet computes it, but for the values that it drops.
#include <algorithm>

#include "dropping.h"
#include "operator.h"

namespace gluon_amp {

double drop_probability(const Attributes& attributes) {
  const double p = attributes.number("p", 0.5);
  if (!(p >= 0 && p < 1)) fail("expected a probability below 1, received p=", p);
  return p;
}

namespace {

constexpr int64_t kRow = 1024, kRange = 16 * kRow;

template <class T>
INLINED void drop_rows(const Dropping& dropping, const T* data, T* out, int64_t begin, int64_t end) {
  float factors[kRow];
  for (int64_t start = begin; start < end; start += kRow) {
    const int64_t count = std::min(kRow, end - start);
    write_factors(dropping, static_cast<uint64_t>(start / kRow), factors, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(to_float(data[start + i]) * factors[i], &out[start + i]);
  }
}

VECTORIZED void drop_range(const Dropping& dropping, const Tensor& data, const Tensor& out, int64_t begin,
                           int64_t end) {
  IN_TYPE(data.type, drop_rows(dropping, data.as<const T>(), out.as<T>(), begin, end));
}

void drop(const Attributes& attributes, const Tensor& data, const Tensor& bits, const Tensor& out) {
  const Dropping dropping(drop_probability(attributes), bits);
  parallel_ranges(data.size(), kRange, [&](int64_t begin, int64_t end) {
    if (dropping.drops)
      drop_range(dropping, data, out, begin, end);
    else
      copy(data, begin, out, begin, end - begin);
  });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  drop(attributes, inputs[0], inputs[1], outputs[0]);
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  drop(attributes, inputs[0], inputs[2], outputs[0]);
  clear(outputs[1]);
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  data_types(attributes, inputs, outputs);
  expect_type(inputs[1], kFloat32, "the random bits");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  drop_probability(attributes);  // for errors at the call, not when it is run
  expect_known(inputs[0], "data");
  expect_shape(inputs[1], {kKeyBits}, "the random bits");
  outputs[0] = inputs[0];
}

}  // namespace

const Operator dropout{"_gluon_amp_dropout", takes<2>, types, shapes, forward, backward};

}  // namespace gluon_amp
