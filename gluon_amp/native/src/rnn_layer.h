// One layer of an RNN in float32 by oneDNN, in one direction or both.
#pragma once

#include "onednn.h"

namespace gluon_amp {

enum class Cell { kRelu, kTanh, kLstm, kGru };

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
  int64_t biases() const { return cell == Cell::kGru ? 4 : gates(); }
  int64_t layer_weights() const { return gates() * states * inputs; }  // of one direction
  int64_t state_weights() const { return gates() * states * states; }
  int64_t outputs() const { return steps * batch * directions * states; }
  onednn::Dims key() const {
    return {static_cast<int64_t>(cell), steps, batch, inputs, states, directions, type, training};
  }
};

// Descriptions of a layer's arrays, in oneDNN's dimensions: layers, directions, inputs, gates, outputs.
struct LayerDescs {
  explicit LayerDescs(const LayerShape& shape);
  onednn::Desc data, states, layer_weights, state_weights, biases, out;
};

// The primitives of a layer, and where its arrays lie.
struct Layer {
  explicit Layer(const LayerShape& shape);
  LayerDescs descs;  // and of their gradients
  onednn::Primitive forward;
  std::shared_ptr<const onednn::Primitive> backward;  // when training
  size_t workspace_bytes() const;
};

std::shared_ptr<const Layer> layer_of(const LayerShape& shape);

// Rearrange weights between MXNet's order and that of a primitive.
void reorder(onednn::Md from, const void* source, onednn::Md to, void* target);

}  // namespace gluon_amp
