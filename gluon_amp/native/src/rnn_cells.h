// What the cells of an RNN compute beside products with weights: one sequence of one step, forward and backward.
// Data is float32 or bfloat16; all else is float32.
#pragma once

#include "vector.h"

namespace gluon_amp {

enum class Cell { kRelu, kTanh, kLstm, kGru };

// Gates come as sums, and are left as what backward needs.
template <class T>
struct Row {
  int64_t states;
  const float *bias, *state_bias;  // sums of both, but for a GRU's new state
  float* gates;
  const float* sums_of_state;  // GRU's
  float* extra;                // LSTM's cells; GRU's part of the state in the new state
  const float *before, *cells_before;
  float *after, *cells_after;
  T* out;
};

// The state's gradient is replaced by that part of the state's before which does not go through weights (GRU's); the
// cells' gradient by that of the cells before.
template <class T>
struct RowGradient {
  int64_t states;
  const float *gates, *extra, *out, *cells_before;
  const T* before;
  float *state, *cells;
  T *to_data, *to_state;  // of the sums; they differ in GRU's new state
};

void forward_row(Cell cell, const Row<float>& row);
void forward_row(Cell cell, const Row<bfloat16>& row);
void backward_row(Cell cell, const RowGradient<float>& row);
void backward_row(Cell cell, const RowGradient<bfloat16>& row);

}  // namespace gluon_amp
