// The parts of an RNN: cells, one sequence of one step beside its products with weights; and layers, in one direction
// or both, by products of matrices: those with the data, and the gradients of the weights, are one product for all
// steps. Data is float32 or bfloat16; all else is float32. oneDNN 3.2 has layers, too, whose backward pass adds to the
// gradients of the weights: with one sequence it takes 1.6 times as long in float32, and six times in bfloat16.
#pragma once

#include "onednn.h"

namespace gluon_amp {

// Memory for what lives during a call.
constexpr size_t kAlignment = 64;
inline size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

class Buffer {
 public:
  explicit Buffer(size_t bytes) : memory_(new char[bytes + kAlignment]), data_(memory_.get()) {
    size_t room = bytes + kAlignment;
    std::align(kAlignment, bytes, data_, room);
  }
  void* data() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::unique_ptr<char[]> memory_;
  void* data_;
};

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

void convert(const float* from, bfloat16* to, int64_t count);
inline void convert(const float* from, float* to, int64_t count) { std::copy_n(from, count, to); }

}  // namespace gluon_amp
