#include "product.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

namespace gluon_amp {

namespace {

using namespace onednn;

constexpr char kProduct[] = "a product of matrices";

Desc desc_of(const Matrices& matrices) { return {matrices.dims, data_type_of(matrices.type), matrices.strides}; }

int64_t product_of(const Dims& dims) {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1}, std::multiplies<int64_t>());
}

void fill_with_zeros(const Matrices& matrices) {
  const int64_t values = product_of(matrices.dims), bytes = matrices.type == kBfloat16 ? 2 : 4;
  int64_t last = 0;
  for (size_t i = 0; i < matrices.dims.size(); ++i) last += (matrices.dims[i] - 1) * matrices.strides[i];
  if (last + 1 != values) fail("expected a dense product of empty matrices");
  std::memset(matrices.data, 0, values * bytes);
}

Dims key_of(char kind, const Matrices& a, const Matrices& b, const Matrices& product) {
  Dims key{kind, a.type, product.type};
  for (const Dims* part : {&a.dims, &a.strides, &b.dims, &b.strides, &product.strides})
    key.insert(key.end(), part->begin(), part->end());
  return key;
}

std::function<int(PrimitiveDesc**, const Attr*)> matmul(Md a, Md b, Md bias, Md product) {
  return [=](PrimitiveDesc** desc, const Attr* attr) {
    return functions().matmul_primitive_desc_create(desc, engine(), a, b, bias, product, attr);
  };
}

}  // namespace

Matrices::Matrices(const Tensor& tensor) : data(tensor.data), type(tensor.type) {
  int64_t count = 1;
  for (int i = 0; i < tensor.ndim - 2; ++i) count *= tensor.shape[i];
  dims = {count, tensor.dim(-2), tensor.dim(-1)};
  strides = {dims[1] * dims[2], dims[2], 1};
}

Matrices Matrices::transposed() const {
  Matrices result = *this;
  std::swap(result.dims[dims.size() - 2], result.dims.back());
  std::swap(result.strides[dims.size() - 2], result.strides.back());
  return result;
}

Matrices as_matrix(const Tensor& tensor, int64_t columns) {
  const int64_t rows = columns ? tensor.size() / columns : 0;
  return {tensor.data, tensor.type, {rows, columns}, {columns, 1}};
}

void multiply(const Matrices& a, const Matrices& b, const Matrices& product, float alpha) {
  if (!product_of(product.dims)) return;
  if (!a.columns()) return fill_with_zeros(product);
  int64_t alpha_bits = 0;
  std::memcpy(&alpha_bits, &alpha, sizeof(alpha));
  Dims key = key_of('m', a, b, product);
  key.push_back(alpha_bits);
  const Desc left = desc_of(a), right = desc_of(b), out = desc_of(product);
  const auto primitive =
      cached<Primitive>(key, [&] { return Primitive(kProduct, matmul(left, right, nullptr, out), alpha); });
  primitive->run({{kSrc, left, a.data}, {kWeightsLayer, right, b.data}, {kDst, out, product.data}});
}

void multiply_rounded(const Matrices& a, const Matrices& b, const Matrices& product, const float* bias) {
  // Rounding to a layout that kernels like takes longer than to a plain one: it gains with many rows.
  constexpr int64_t kManyRows = 1024;
  if (!product_of(product.dims)) return;
  const bool rounds = a.type != kFloat32, packs = rounds && a.rows() >= kManyRows;
  Dims key = key_of(packs ? 'p' : 'r', a, b, product);
  key.push_back(bias != nullptr);
  const Desc left = desc_of(a), from = desc_of(b), out = desc_of(product), added({1, product.columns()}, kF32);
  const Desc right = packs ? Desc::any(b.dims, data_type_of(a.type)) : Desc(b.dims, data_type_of(a.type), b.strides);
  const auto primitive = cached<Primitive>(
      key, [&] { return Primitive(kProduct, matmul(left, right, bias ? static_cast<Md>(added) : nullptr, out)); });
  const Md wanted = primitive->query(kWeights);
  key.push_back('c');
  const void* factor = rounds ? reordered(key, from, b.data, wanted) : b.data;
  primitive->run(
      {{kSrc, left, a.data}, {kWeightsLayer, wanted, factor}, {kBias, added, bias}, {kDst, out, product.data}});
}

void add_up(const Matrices& grad, const Matrices& data, float* weight_grad, float* bias_grad) {
  const DataType type = data_type_of(data.type);
  const Dims dims{grad.columns(), data.columns()};
  const Desc rows(data.dims, type), grads(grad.dims, type), weights(dims, kF32), biases({grad.columns()}, kF32);
  const Md bias = bias_grad ? static_cast<Md>(biases) : nullptr;
  const Desc any = Desc::any(dims, type);
  const auto forward_of = [&](PrimitiveDesc** desc, const Attr* attr) {
    return functions().inner_product_forward_primitive_desc_create(desc, engine(), kForwardTraining, rows, any, bias,
                                                                   grads, attr);
  };
  const Dims key{'d', data.type, data.rows(), data.columns(), grad.columns(), bias_grad != nullptr};
  const auto primitive = cached<Primitive>(key, [&] {
    const Primitive hint("a dense layer", forward_of);
    return Primitive("gradients of a dense layer", [&](PrimitiveDesc** desc, const Attr* attr) {
      return functions().inner_product_backward_weights_primitive_desc_create(desc, engine(), rows, weights, bias,
                                                                              grads, hint.desc(), attr);
    });
  });
  primitive->run({{kSrc, rows, data.data},
                  {kDiffDst, grads, grad.data},
                  {kDiffWeightsLayer, weights, weight_grad},
                  {kDiffBias, biases, bias_grad}});
}

}  // namespace gluon_amp
