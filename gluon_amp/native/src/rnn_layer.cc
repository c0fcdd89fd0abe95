#include "rnn_layer.h"

namespace gluon_amp {

namespace {

using namespace onednn;

int direction_of(const LayerShape& shape) {
  return shape.directions == 1 ? kLeftToRight : kBothConcatenated;
}

int activation_of(const LayerShape& shape) { return shape.cell == Cell::kRelu ? kRelu : kTanh; }

Primitive make_forward(const LayerShape& shape, const LayerDescs& d) {
  return Primitive("an RNN", [&](PrimitiveDesc** desc, const Attr* attr) {
    const Functions& f = functions();
    const int prop = shape.training ? kForwardTraining : kForwardInference;
    const int direction = direction_of(shape);
    if (shape.cell == Cell::kLstm)
      return f.lstm_forward_primitive_desc_create(desc, engine(), prop, direction, d.data, d.states, d.states,
                                                  d.layer_weights, d.state_weights, nullptr, nullptr, d.biases, d.out,
                                                  d.states, d.states, 0, attr);
    if (shape.cell == Cell::kGru)
      return f.lbr_gru_forward_primitive_desc_create(desc, engine(), prop, direction, d.data, d.states,
                                                     d.layer_weights, d.state_weights, d.biases, d.out, d.states, 0,
                                                     attr);
    return f.vanilla_rnn_forward_primitive_desc_create(desc, engine(), prop, activation_of(shape), direction,
                                                       d.data, d.states, d.layer_weights, d.state_weights, d.biases,
                                                       d.out, d.states, 0, 0, 0, attr);
  });
}

Primitive make_backward(const LayerShape& shape, const LayerDescs& d, const Primitive& forward) {
  return Primitive("an RNN's gradient", [&](PrimitiveDesc** desc, const Attr* attr) {
    const Functions& f = functions();
    const int direction = direction_of(shape);
    if (shape.cell == Cell::kLstm)
      return f.lstm_backward_primitive_desc_create(desc, engine(), kBackward, direction, d.data,
                                                   d.states, d.states, d.layer_weights, d.state_weights, nullptr,
                                                   nullptr, d.biases, d.out, d.states, d.states, d.data, d.states,
                                                   d.states, d.layer_weights, d.state_weights, nullptr, nullptr,
                                                   d.biases, d.out, d.states, d.states, 0, forward.desc(), attr);
    if (shape.cell == Cell::kGru)
      return f.lbr_gru_backward_primitive_desc_create(desc, engine(), kBackward, direction, d.data,
                                                      d.states, d.layer_weights, d.state_weights, d.biases, d.out,
                                                      d.states, d.data, d.states, d.layer_weights, d.state_weights,
                                                      d.biases, d.out, d.states, 0, forward.desc(), attr);
    return f.vanilla_rnn_backward_primitive_desc_create(
        desc, engine(), kBackward, activation_of(shape), direction, d.data, d.states, d.layer_weights,
        d.state_weights, d.biases, d.out, d.states, d.data, d.states, d.layer_weights, d.state_weights, d.biases, d.out,
        d.states, 0, 0, 0, forward.desc(), attr);
  });
}

}  // namespace

LayerDescs::LayerDescs(const LayerShape& s)
    : data({s.steps, s.batch, s.inputs}, kF32),
      states({1, s.directions, s.batch, s.states}, kF32),
      layer_weights(Desc::any({1, s.directions, s.inputs, s.gates(), s.states}, kF32)),
      state_weights(Desc::any({1, s.directions, s.states, s.gates(), s.states}, kF32)),
      biases({1, s.directions, s.biases(), s.states}, kF32),
      out({s.steps, s.batch, s.directions * s.states}, kF32) {}

Layer::Layer(const LayerShape& shape)
    : descs(shape), forward(make_forward(shape, descs)) {
  if (shape.training) backward = std::make_shared<const Primitive>(make_backward(shape, descs, forward));
}

size_t Layer::workspace_bytes() const { return bytes(forward.query(kWorkspace)); }

std::shared_ptr<const Layer> layer_of(const LayerShape& shape) {
  return cached<Layer>(shape.key(), [&] { return Layer(shape); });
}

void reorder(Md from, const void* source, Md to, void* target) {
  Primitive("a reordering of weights", [&](PrimitiveDesc** desc, const Attr* attr) {
    return functions().reorder_primitive_desc_create(desc, from, engine(), to, engine(), attr);
  }).run({{kSrc, from, source}, {kDst, to, target}});
}

}  // namespace gluon_amp
