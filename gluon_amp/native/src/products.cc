// Products of matrices by oneDNN, and the operators that are one.
//
// batch_dot: products of many small matrices, as MXNet's batch_dot, linalg_gemm2 and np.matmul compute them: over equal
// leading dimensions, either matrix transposed, the product times alpha. A pile that is not transposed may be times one
// matrix.
//
// dense: layers, as MXNet's FullyConnected computes them. Weight and bias are float32; the product takes the type of
// the data, for which the weight is rounded at every call: less memory is read than for a second weight that is kept.
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "onednn.h"

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

namespace {

struct BatchSettings {
  explicit BatchSettings(const Attributes& attributes)
      : transposed_a(attributes.flag("transpose_a", false)),
        transposed_b(attributes.flag("transpose_b", false)),
        alpha(attributes.real("alpha", 1)) {}
  bool transposed_a, transposed_b;
  float alpha;
};

// The matrices of a tensor; all rows of a pile are those of one matrix where the other factor is one.
Matrices matrices_of(const Tensor& tensor, const Tensor& other) {
  if (other.ndim > 2) return Matrices(tensor);
  const int64_t columns = tensor.dim(-1), rows = columns ? tensor.size() / columns : 0;
  return {tensor.data, tensor.type, {1, rows, columns}, {rows * columns, columns, 1}};
}

void batch_forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const BatchSettings s(attributes);
  const Matrices a = matrices_of(inputs[0], inputs[1]), b(inputs[1]);
  multiply(a.transposed_if(s.transposed_a), b.transposed_if(s.transposed_b), matrices_of(outputs[0], inputs[1]),
           s.alpha);
}

// With C = A B: A' = C' B^T and B' = A^T C'; the gradient of a matrix that is read as transposed is, too.
void batch_backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const BatchSettings s(attributes);
  const Matrices grad = matrices_of(inputs[0], inputs[2]), a = matrices_of(inputs[1], inputs[2]), b(inputs[2]),
                 a_grad = matrices_of(outputs[0], inputs[2]), b_grad(outputs[1]);
  if (s.transposed_a)
    multiply(b.transposed_if(s.transposed_b), grad.transposed(), a_grad, s.alpha);
  else
    multiply(grad, b.transposed_if(!s.transposed_b), a_grad, s.alpha);
  if (s.transposed_b)
    multiply(grad.transposed(), a.transposed_if(s.transposed_a), b_grad, s.alpha);
  else
    multiply(a.transposed_if(!s.transposed_a), grad, b_grad, s.alpha);
}

void batch_types(const Attributes&, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "the first matrices");
  expect_type(inputs[1], inputs[0], "the second matrices");
}

void batch_shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  onednn::functions();  // for errors at the call, not when it is run
  const BatchSettings s(attributes);
  const Shape &a = inputs[0], &b = inputs[1];
  expect_known(a, "the first matrices");
  expect_known(b, "the second matrices");
  const bool is_one = b.size() == 2 && a.size() >= 2 && !s.transposed_a;
  if (!is_one && (a.size() < 3 || a.size() != b.size() || !std::equal(a.begin(), a.end() - 2, b.begin())))
    fail("expected equal leading dimensions, or one matrix behind a pile, received shapes ", describe(a), " and ",
         describe(b));
  const size_t row = a.size() - 2, column = a.size() - 1;
  const size_t b_column = b.size() - 1, b_row = b_column - 1;
  if (a[s.transposed_a ? row : column] != b[s.transposed_b ? b_column : b_row])
    fail("the matrices do not fit: received shapes ", describe(a), s.transposed_a ? " (transposed)" : "", " and ",
         describe(b), s.transposed_b ? " (transposed)" : "");
  outputs[0] = a;
  outputs[0][row] = a[s.transposed_a ? column : row];
  outputs[0][column] = b[s.transposed_b ? b_row : b_column];
}

Matrices weight_of(const Tensor& tensor) { return as_matrix(tensor, tensor.dim(1)); }

void dense_forward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[0], &weight = inputs[1];
  multiply_rounded(as_matrix(data, weight.dim(1)), weight_of(weight).transposed(), as_matrix(outputs[0], weight.dim(0)),
                   inputs.size() > 2 ? inputs[2].as<float>() : nullptr);
}

void dense_backward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[1], &weight = inputs[2];
  const Matrices grad = as_matrix(inputs[0], weight.dim(0)), rows = as_matrix(data, weight.dim(1));
  float* bias_grad = outputs.size() > 2 ? outputs[2].as<float>() : nullptr;
  if (!rows.rows()) return clear(outputs, 1);
  multiply_rounded(grad, weight_of(weight), as_matrix(outputs[0], weight.dim(1)));
  add_up(grad, rows, outputs[1].as<float>(), bias_grad);
}

struct DenseSettings {
  explicit DenseSettings(const Attributes& attributes)
      : units(static_cast<uint32_t>(attributes.number("num_hidden"))),
        is_biased(!attributes.flag("no_bias", false)),
        flattens(attributes.flag("flatten", true)) {}
  uint32_t units;
  bool is_biased, flattens;
};

void dense_shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  functions();  // for errors at the call, not when it is run
  const DenseSettings s(attributes);
  const Shape& data = inputs[0];
  expect_known(data, "data");
  if (data.size() < 2) fail("expected two dimensions or more, received data of shape ", describe(data));
  const uint32_t width =
      s.flattens ? std::accumulate(data.begin() + 1, data.end(), 1u, std::multiplies<uint32_t>()) : data.back();
  expect_shape(inputs[1], {s.units, width}, "weight");
  if (s.is_biased) expect_shape(inputs[2], {s.units}, "bias");
  outputs[0] = s.flattens ? Shape{data[0], s.units} : data;
  outputs[0].back() = s.units;
}

Arity dense_arity(const Attributes& attributes) { return {DenseSettings(attributes).is_biased ? 3 : 2, 1}; }

}  // namespace

const Operator batch_dot{"_gluon_amp_batch_dot", takes<2>, batch_types, batch_shapes, batch_forward, batch_backward};
const Operator dense{"_gluon_amp_dense", dense_arity, layer_types, dense_shapes, dense_forward, dense_backward};

}  // namespace gluon_amp
