// LSTM, GRU and plain RNNs as MXNet's RNN takes them: layers, both directions, states in and out. The parameters come
// in one vector, or, with separate=True, in an array each, in the order that they have in the vector: joining them
// takes longer than a layer on few sequences. Data and output may be bfloat16; everything else is float32.
//
// Between layers the values are multiplied by masks that are inputs: MXNet's Dropout of ones makes them, which knows
// whether this is training. When training, the last output keeps what backward needs.
#include "rnn.h"

#include <algorithm>

namespace gluon_amp {

namespace {

VECTORIZED void to_floats(const bfloat16* from, float* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

template <class T>
void multiply(const T* values, const float* mask, T* products, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(to_float(values[i]) * mask[i], &products[i]);
}

struct Settings {
  explicit Settings(const Attributes& attributes)
      : states(attributes.integer("state_size", 0)),
        layers(attributes.integer("num_layers", 0)),
        directions(attributes.flag("bidirectional", false) ? 2 : 1),
        masked(attributes.flag("masks", false) && layers > 1),
        separate(attributes.flag("separate", false)),
        training(attributes.flag("training", true)) {
    const std::string mode = attributes.text("mode"), data = attributes.text("dtype", "float32");
    if (mode == "lstm")
      cell = Cell::kLstm;
    else if (mode == "gru")
      cell = Cell::kGru;
    else if (mode == "rnn_relu")
      cell = Cell::kRelu;
    else if (mode == "rnn_tanh")
      cell = Cell::kTanh;
    else
      fail("expected lstm, gru, rnn_relu or rnn_tanh, received mode='", mode, "'");
    if (data != "float32" && data != "bfloat16") fail("expected float32 or bfloat16, received dtype='", data, "'");
    type = data == "bfloat16" ? kBfloat16 : kFloat32;
    if (states < 1 || layers < 1)
      fail("expected positive numbers, received state_size=", states, ", num_layers=", layers);
  }

  bool lstm() const { return cell == Cell::kLstm; }
  int masks() const { return masked ? layers - 1 : 0; }
  // Inputs are the data, the parameters, the states, and the masks.
  int parts() const { return separate ? 4 * layers * directions : 1; }
  int state() const { return 1 + parts(); }
  int first_mask() const { return state() + 1 + lstm(); }
  int inputs() const { return first_mask() + masks(); }
  int outputs() const { return 2 + lstm() + training; }
  size_t item() const { return type == kBfloat16 ? 2 : 4; }

  LayerShape layer(int index, int64_t steps, int64_t batch, int64_t inputs) const {
    return {cell, steps, batch, index ? directions * states : inputs, states, directions, type, training};
  }
  // The shapes of all parameters, in MXNet's order: first the weights of all layers, then their biases; for each layer
  // and direction what belongs to the data and what belongs to the state.
  std::vector<std::vector<int64_t>> parameters(int64_t inputs) const {
    std::vector<std::vector<int64_t>> shapes;
    for (const bool biases : {false, true})
      for (int i = 0; i < layers * directions; ++i) {
        const LayerShape s = layer(i / directions, 1, 1, inputs);
        for (const int64_t width : {s.inputs, static_cast<int64_t>(states)}) {
          shapes.push_back({s.gates() * states});
          if (!biases) shapes.back().push_back(width);
        }
      }
    return shapes;
  }

  Cell cell;
  int states, layers, directions;
  bool masked, separate, training;
  int type;
};

int64_t product(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t dimension : shape) count *= dimension;
  return count;
}

std::vector<float*> places_of(const Settings& s, const Tensor& data, const Tensor* parameters) {
  std::vector<float*> places;
  float* next = s.separate ? nullptr : parameters->as<float>();
  for (const std::vector<int64_t>& shape : s.parameters(data.dim(2))) {
    places.push_back(s.separate ? parameters[places.size()].as<float>() : next);
    if (next) next += product(shape);
  }
  return places;
}

// A call's arrays, layer by layer.
class Call {
 public:
  Call(const Settings& settings, const Tensor& data) : settings_(settings), data_(data) {
    size_t offset = 0;
    for (int i = 0; i < settings.layers; ++i) {
      shapes_.push_back(settings.layer(i, data.dim(0), data.dim(1), data.dim(2)));
      workspaces_.push_back(offset);
      if (settings.training) offset += aligned(kept_bytes(shapes_[i]));
      outputs_.push_back(offset);
      offset += i + 1 < settings.layers ? 2 * aligned(shapes_[i].outputs() * settings.item()) : 0;
    }
    workspace_size_ = offset;
  }

  // The parameters of a layer, or their gradients.
  Parameters parameters(int i, const std::vector<float*>& places) const {
    const auto weights = places.begin() + i * 2 * settings_.directions, biases = weights + places.size() / 2;
    return {{weights, weights + 2 * settings_.directions}, {biases, biases + 2 * settings_.directions}};
  }
  const LayerShape& shape(int i) const { return shapes_[i]; }
  size_t workspace_size() const { return workspace_size_; }
  void* workspace(char* base, int i) const { return base + workspaces_[i]; }
  // What a layer but the last gives, and that times the mask, which the next layer reads.
  char* kept_output(char* base, int i) const { return base + outputs_[i]; }
  char* masked_output(char* base, int i) const {
    return base + outputs_[i] + (settings_.masked ? aligned(shapes_[i].outputs() * settings_.item()) : 0);
  }
  size_t state_offset(int i) const { return i * settings_.directions * data_.dim(1) * settings_.states; }

 private:
  const Settings& settings_;
  const Tensor& data_;
  std::vector<LayerShape> shapes_;
  std::vector<size_t> workspaces_, outputs_;
  size_t workspace_size_;
};

// A piece of an array of states that begins at an element; null where there is no array.
float* at(const Tensor* tensor, size_t element) { return tensor ? tensor->as<float>() + element : nullptr; }

void apply_mask(const Settings& s, const Tensor& mask, const void* values, void* products) {
  IN_TYPE(s.type, multiply(static_cast<const T*>(values), mask.as<float>(), static_cast<T*>(products), mask.size()));
}

// The arrays of layer i. The operator's inputs and outputs are `in` and `out`.
LayerArrays arrays_of(const Settings& s, const Call& call, int i, const Tensor* in, const Tensor* out, char* base) {
  const size_t offset = call.state_offset(i);
  const int state = s.state();
  return {i ? call.masked_output(base, i - 1) : in[0].data,
          at(&in[state], offset),
          at(s.lstm() ? &in[state + 1] : nullptr, offset),
          i + 1 == s.layers ? out[0].data : call.kept_output(base, i),
          at(&out[1], offset),
          at(s.lstm() ? &out[2] : nullptr, offset),
          s.training ? call.workspace(base, i) : nullptr};
}

// Without a step, states stay what they are, and so do their gradients.
void copy_states(const Settings& s, const Tensor* from, const Tensor* to) {
  for (int i = 0; i <= s.lstm(); ++i) copy(from[i], 0, to[i], 0, from[i].size());
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  if (!outputs[0].size()) return copy_states(s, &inputs[s.state()], &outputs[1]);
  const Call call(s, inputs[0]);
  const std::vector<float*> places = places_of(s, inputs[0], &inputs[1]);
  const Buffer own(s.training ? 0 : call.workspace_size());
  char* base = static_cast<char*>(s.training ? outputs.back().data : own.data());
  for (int i = 0; i < s.layers; ++i) {
    const LayerArrays arrays = arrays_of(s, call, i, inputs.data(), outputs.data(), base);
    forward_layer(call.shape(i), call.parameters(i, places), arrays);
    if (i + 1 < s.layers && s.masked)
      apply_mask(s, inputs[s.first_mask() + i], arrays.out, call.masked_output(base, i));
  }
}

// Gradients of an array as float32.
Buffer as_floats(const Tensor& values) {
  Buffer floats(values.size() * sizeof(float));
  if (values.type == kBfloat16)
    to_floats(values.as<bfloat16>(), floats.as<float>(), values.size());
  else
    std::copy_n(values.as<float>(), values.size(), floats.as<float>());
  return floats;
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Settings s(attributes);
  if (!s.training) fail("expected training=True for a gradient, received training=False");
  const Tensor *grads = inputs.data(), *in = grads + s.outputs(), *out = in + s.inputs();
  const int state = s.state();
  if (!out[0].size()) {
    clear(outputs);
    return copy_states(s, &grads[1], &outputs[state]);
  }
  const Call call(s, in[0]);
  const std::vector<float*> places = places_of(s, in[0], &in[1]), grad_places = places_of(s, in[0], &outputs[1]);
  char* base = static_cast<char*>(out[s.outputs() - 1].data);
  Buffer out_grad = as_floats(grads[0]);
  for (int i = s.layers; i-- > 0;) {
    const LayerShape& shape = call.shape(i);
    const size_t offset = call.state_offset(i);
    const Parameters parameters = call.parameters(i, places), parameter_grads = call.parameters(i, grad_places);
    const LayerArrays arrays = arrays_of(s, call, i, in, out, base);
    Buffer data_grad(shape.steps * shape.batch * shape.inputs * sizeof(float));
    const LayerGradients gradients{
        out_grad.as<float>(),  at(&grads[1], offset),       at(s.lstm() ? &grads[2] : nullptr, offset),
        data_grad.as<float>(), at(&outputs[state], offset), at(s.lstm() ? &outputs[state + 1] : nullptr, offset)};
    backward_layer(shape, parameters, arrays, parameter_grads, gradients);
    if (i && s.masked) {
      multiply(data_grad.as<float>(), in[s.first_mask() + i - 1].as<float>(), data_grad.as<float>(),
               in[s.first_mask() + i - 1].size());
      clear(outputs[s.first_mask() + i - 1]);  // masks are not learned
    }
    out_grad = std::move(data_grad);
  }
  IN_TYPE(s.type, convert(out_grad.as<float>(), outputs[0].as<T>(), outputs[0].size()));
}

Arity arity(const Attributes& attributes) {
  const Settings s(attributes);
  return {s.inputs(), s.outputs()};
}

void types(const Attributes& attributes, Types& inputs, Types& outputs) {
  const Settings s(attributes);
  for (int i = 0; i < s.inputs(); ++i) {
    const bool parameter = 0 < i && i < s.state();
    expect_type(inputs[i], i ? +kFloat32 : s.type, parameter ? "parameters" : "an input");
  }
  for (size_t i = 0; i < outputs.size(); ++i) outputs[i] = i ? +kFloat32 : s.type;
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  const Settings s(attributes);
  const auto dimension = [](int64_t value) { return static_cast<uint32_t>(value); };
  expect_known(inputs[0], "data");
  if (inputs[0].size() != 3) fail("expected steps, batch and inputs, received data of shape ", describe(inputs[0]));
  if (!inputs[0][2]) fail("expected one input or more, received data of shape ", describe(inputs[0]));
  const uint32_t steps = inputs[0][0], batch = inputs[0][1];
  const Shape out{steps, batch, dimension(s.directions * s.states)};
  const Shape states{dimension(s.layers * s.directions), batch, dimension(s.states)};
  int64_t total = 0, part = 1;
  for (const std::vector<int64_t>& shape : s.parameters(inputs[0][2])) {
    total += product(shape);
    if (s.separate) expect_shape(inputs[part++], Shape(shape.begin(), shape.end()), "a parameter");
  }
  if (!s.separate) expect_shape(inputs[1], {dimension(total)}, "parameters");
  expect_shape(inputs[s.state()], states, "state");
  if (s.lstm()) expect_shape(inputs[s.state() + 1], states, "state_cell");
  for (int i = 0; i < s.masks(); ++i) expect_shape(inputs[s.first_mask() + i], out, "a mask");
  outputs[0] = out;
  outputs[1] = states;
  if (s.lstm()) outputs[2] = states;
  if (!s.training) return;
  const int64_t dims[] = {steps, batch, inputs[0][2]};
  const Tensor data{nullptr, dims, 3, s.type, 0};
  outputs.back() = {dimension(data.size() ? Call(s, data).workspace_size() / sizeof(float) : 1)};
}

}  // namespace

const Operator rnn{"_gluon_amp_rnn", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
