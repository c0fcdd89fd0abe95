// Products of many small matrices, as MXNet's batch_dot and linalg_gemm2 compute them: over equal leading dimensions,
// either matrix transposed, the product times alpha.
#include <algorithm>
#include <cstring>
#include <utility>

#include "families.h"
#include "onednn.h"
#include "operator.h"

namespace gluon_amp {

namespace {

using onednn::Dims;

// A pile of row-major matrices, maybe read as transposed ones.
struct Matrices {
  Matrices(const Tensor& tensor, bool transposed)
      : data(tensor.data), type(tensor.type), rows(tensor.dim(-2)), columns(tensor.dim(-1)), strides{0, columns, 1} {
    strides[0] = rows * columns;
    count = 1;
    for (int i = 0; i < tensor.ndim - 2; ++i) count *= tensor.shape[i];
    if (transposed) {
      std::swap(rows, columns);
      std::swap(strides[1], strides[2]);
    }
  }

  onednn::Desc desc() const { return {{count, rows, columns}, onednn::data_type_of(type), strides}; }

  void* data;
  int type;
  int64_t count, rows, columns;
  Dims strides;
};

void multiply(const Matrices& a, const Matrices& b, const Matrices& product, float alpha) {
  const int64_t values = product.count * product.rows * product.columns;
  if (!values) return;
  if (!a.columns) {
    std::memset(product.data, 0, values * (product.type == kBfloat16 ? 2 : 4));
    return;
  }
  Dims key{product.type, a.count, a.rows, a.columns, b.columns, a.strides[1], b.strides[1]};
  int64_t alpha_bits = 0;
  std::memcpy(&alpha_bits, &alpha, sizeof(alpha));
  key.push_back(alpha_bits);
  const onednn::Desc left = a.desc(), right = b.desc(), out = product.desc();
  const auto primitive = onednn::cached<onednn::Primitive>(key, [&] {
    return onednn::Primitive(
        "a product of matrices",
        [&](onednn::PrimitiveDesc** desc, const onednn::Attr* attr) {
          return onednn::functions().matmul_primitive_desc_create(desc, onednn::engine(), left, right, nullptr, out,
                                                                  attr);
        },
        alpha);
  });
  primitive->run(
      {{onednn::kSrc, left, a.data}, {onednn::kWeightsLayer, right, b.data}, {onednn::kDst, out, product.data}});
}

struct Settings {
  explicit Settings(const Attributes& attributes)
      : transposed_a(attributes.flag("transpose_a", false)),
        transposed_b(attributes.flag("transpose_b", false)),
        alpha(static_cast<float>(attributes.number("alpha", 1))) {}
  bool transposed_a, transposed_b;
  float alpha;
};

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  multiply({inputs[0], s.transposed_a}, {inputs[1], s.transposed_b}, {outputs[0], false}, s.alpha);
}

// With C = A B: A' = C' B^T and B' = A^T C'; where A or B is read as transposed, so is its gradient.
void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Tensor &grad = inputs[0], &a = inputs[1], &b = inputs[2];
  if (s.transposed_a)
    multiply({b, s.transposed_b}, {grad, true}, {outputs[0], false}, s.alpha);
  else
    multiply({grad, false}, {b, !s.transposed_b}, {outputs[0], false}, s.alpha);
  if (s.transposed_b)
    multiply({grad, true}, {a, s.transposed_a}, {outputs[1], false}, s.alpha);
  else
    multiply({a, !s.transposed_a}, {grad, false}, {outputs[1], false}, s.alpha);
}

void types(const Attributes&, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "the first matrices");
  expect_type(inputs[1], inputs[0], "the second matrices");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  onednn::functions();  // for errors at the call, not when it is run
  const Settings s(attributes);
  const Shape &a = inputs[0], &b = inputs[1];
  expect_known(a, "the first matrices");
  expect_known(b, "the second matrices");
  if (a.size() < 3 || a.size() != b.size() || !std::equal(a.begin(), a.end() - 2, b.begin()))
    fail("expected equal leading dimensions, received shapes ", describe(a), " and ", describe(b));
  const size_t row = a.size() - 2, column = a.size() - 1;
  if (a[s.transposed_a ? row : column] != b[s.transposed_b ? column : row])
    fail("the matrices do not fit: received shapes ", describe(a), s.transposed_a ? " (transposed)" : "", " and ",
         describe(b), s.transposed_b ? " (transposed)" : "");
  outputs[0] = a;
  outputs[0][row] = a[s.transposed_a ? column : row];
  outputs[0][column] = b[s.transposed_b ? row : column];
}

Arity arity(const Attributes&) { return {2, 1}; }

}  // namespace

const Operator batch_dot{"_gluon_amp_batch_dot", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
