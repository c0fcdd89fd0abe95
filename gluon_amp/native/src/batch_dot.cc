// Products of many small matrices, as MXNet's batch_dot, linalg_gemm2 and np.matmul compute them: over equal leading
// dimensions, either matrix transposed, the product times alpha. A pile that is not transposed may be times one matrix.
#include <algorithm>

#include "families.h"
#include "operator.h"
#include "product.h"

namespace gluon_amp {

namespace {

struct Settings {
  explicit Settings(const Attributes& attributes)
      : transposed_a(attributes.flag("transpose_a", false)),
        transposed_b(attributes.flag("transpose_b", false)),
        alpha(static_cast<float>(attributes.number("alpha", 1))) {}
  bool transposed_a, transposed_b;
  float alpha;
};

// The matrices of a tensor; all rows of a pile are those of one matrix where the other factor is one.
Matrices matrices_of(const Tensor& tensor, const Tensor& other) {
  if (other.ndim > 2) return Matrices(tensor);
  const int64_t columns = tensor.dim(-1), rows = columns ? tensor.size() / columns : 0;
  return {tensor.data, tensor.type, {1, rows, columns}, {rows * columns, columns, 1}};
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  const Matrices a = matrices_of(inputs[0], inputs[1]), b(inputs[1]);
  multiply(a.transposed_if(s.transposed_a), b.transposed_if(s.transposed_b), matrices_of(outputs[0], inputs[1]),
           s.alpha);
}

// With C = A B: A' = C' B^T and B' = A^T C'; the gradient of a matrix that is read as transposed is, too.
void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
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

Arity arity(const Attributes&) { return {2, 1}; }

}  // namespace

const Operator batch_dot{"_gluon_amp_batch_dot", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
