// Products of piles of matrices by oneDNN.
#pragma once

#include "onednn.h"
#include "operator.h"

namespace gluon_amp {

// A pile of matrices: equal leading dimensions, then rows and columns, anywhere in an array.
struct Matrices {
  Matrices(void* start, int kind, onednn::Dims sizes, onednn::Dims steps)
      : data(start), type(kind), dims(std::move(sizes)), strides(std::move(steps)) {}
  // Row-major ones, all leading dimensions taken together.
  explicit Matrices(const Tensor& tensor);

  int64_t rows() const { return dims[dims.size() - 2]; }
  int64_t columns() const { return dims.back(); }
  Matrices transposed() const;
  Matrices transposed_if(bool wanted) const { return wanted ? transposed() : *this; }

  void* data;
  int type;
  onednn::Dims dims, strides;
};

// The data of a layer, or what it gives, as one matrix.
Matrices as_matrix(const Tensor& tensor, int64_t columns);

// Write alpha * a * b. The piles have equal leading dimensions; a and b are of one type.
void multiply(const Matrices& a, const Matrices& b, const Matrices& product, float alpha = 1);

// Write a * b, of one pair of matrices of which b is float32 and rounded to the type of a. A bias, in float32, is added
// to every row.
void multiply_rounded(const Matrices& a, const Matrices& b, const Matrices& product, const float* bias = nullptr);

// Write the gradients of a dense layer's float32 weight, columns of grad times columns of data, and of its bias.
void add_up(const Matrices& grad, const Matrices& data, float* weight_grad, float* bias_grad);

}  // namespace gluon_amp
