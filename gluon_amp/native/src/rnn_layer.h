// One layer of an RNN, in one direction or both, by products of matrices: those with the data, and the gradients of the
// weights, are one product for all steps. oneDNN 3.2 has layers, too, whose backward pass adds to the gradients of the
// weights: with one sequence it takes 1.6 times as long in float32, and six times in bfloat16.
#pragma once

#include "onednn.h"
#include "rnn_cells.h"

namespace gluon_amp {

// Where a layer's parameters lie: for each direction those of the data and those of the state.
struct Parameters {
  std::vector<float*> weights, biases;
};

struct LayerShape {
  Cell cell;
  int64_t steps, batch, inputs, states, directions;
  int type;
  bool training;

  int64_t gates() const { return cell == Cell::kLstm ? 4 : cell == Cell::kGru ? 3 : 1; }
  int64_t outputs() const { return steps * batch * directions * states; }
  onednn::Dims key() const {
    return {static_cast<int64_t>(cell), steps, batch, inputs, states, directions, type, training};
  }
};

// What a layer reads and writes, data and output in its type. Arrays of states have a matrix for each direction;
// `cells` are LSTM's.
struct LayerArrays {
  const void* data;
  const float *states, *cells;  // before the first step
  void* out;
  float *last_states, *last_cells;
  void* kept;  // for the backward pass, of kept_bytes; null when not training
};

struct LayerGradients {
  const float *out, *last_states, *last_cells;  // what comes
  float *data, *states, *cells;                 // what goes
};

size_t kept_bytes(const LayerShape& shape);
void forward_layer(const LayerShape& shape, const Parameters& parameters, const LayerArrays& arrays);
void backward_layer(const LayerShape& shape, const Parameters& parameters, const LayerArrays& arrays,
                    const Parameters& parameter_gradients, const LayerGradients& gradients);

}  // namespace gluon_amp
