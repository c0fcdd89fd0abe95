// A layer of an RNN in bfloat16, by products of matrices. oneDNN 3.2 has layers in bfloat16, too, but their backward
// pass adds to the gradient of the weights at every step: for one sequence six times as long as in float32.
#pragma once

#include "rnn_layer.h"
#include "vector.h"

namespace gluon_amp {

// What a layer reads and writes. Arrays of states have a matrix for each direction; `cells` are LSTM's.
struct LowArrays {
  const bfloat16* data;
  const float *states, *cells;  // before the first step
  bfloat16* out;
  float *last_states, *last_cells;
  float* kept;  // for the backward pass, of low_workspace_bytes
};

struct LowGradients {
  const float *out, *last_states, *last_cells;  // what comes
  float *data, *states, *cells;                 // what goes
};

size_t low_workspace_bytes(const LayerShape& shape);
void low_forward(const LayerShape& shape, const Parameters& parameters, const LowArrays& arrays);
void low_backward(const LayerShape& shape, const Parameters& parameters, const LowArrays& arrays,
                  const Parameters& parameter_gradients, const LowGradients& gradients);

}  // namespace gluon_amp
