#include "product.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

namespace gluon_amp {

namespace {

using onednn::Desc;
using onednn::Dims;

Desc desc_of(const Matrices& matrices) {
  return {matrices.dims, onednn::data_type_of(matrices.type), matrices.strides};
}

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

void multiply(const Matrices& a, const Matrices& b, const Matrices& product, float alpha, const float* bias) {
  if (!product_of(product.dims)) return;
  if (!a.columns()) return fill_with_zeros(product);
  int64_t alpha_bits = 0;
  std::memcpy(&alpha_bits, &alpha, sizeof(alpha));
  Dims key{'m', a.type, product.type, alpha_bits, bias != nullptr};
  for (const Dims* part : {&a.dims, &a.strides, &b.dims, &b.strides, &product.strides})
    key.insert(key.end(), part->begin(), part->end());
  Dims bias_dims(product.dims.size(), 1);
  bias_dims.back() = product.columns();
  const Desc left = desc_of(a), right = desc_of(b), out = desc_of(product), added(bias_dims, onednn::kF32);
  const auto primitive = onednn::cached<onednn::Primitive>(key, [&] {
    return onednn::Primitive(
        "a product of matrices",
        [&](onednn::PrimitiveDesc** desc, const onednn::Attr* attr) {
          return onednn::functions().matmul_primitive_desc_create(
              desc, onednn::engine(), left, right, bias ? static_cast<onednn::Md>(added) : nullptr, out, attr);
        },
        alpha);
  });
  primitive->run({{onednn::kSrc, left, a.data},
                  {onednn::kWeightsLayer, right, b.data},
                  {onednn::kBias, added, bias},
                  {onednn::kDst, out, product.data}});
}

}  // namespace gluon_amp
