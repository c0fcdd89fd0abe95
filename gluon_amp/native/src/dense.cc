// Dense layers, as MXNet's FullyConnected computes them. Weight and bias are float32; the product takes the type of the
// data, for which the weight is rounded at every call: less memory is read than for a second weight that is kept.
#include <algorithm>
#include <functional>
#include <numeric>

#include "families.h"
#include "operator.h"
#include "product.h"

namespace gluon_amp {

namespace {

using namespace onednn;

Matrices weight_of(const Tensor& tensor) { return as_matrix(tensor, tensor.dim(1)); }

void forward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[0], &weight = inputs[1];
  multiply_rounded(as_matrix(data, weight.dim(1)), weight_of(weight).transposed(), as_matrix(outputs[0], weight.dim(0)),
                   inputs.size() > 2 ? inputs[2].as<float>() : nullptr);
}

void backward(const Attributes&, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[1], &weight = inputs[2];
  const Matrices grad = as_matrix(inputs[0], weight.dim(0)), rows = as_matrix(data, weight.dim(1));
  float* bias_grad = outputs.size() > 2 ? outputs[2].as<float>() : nullptr;
  if (!rows.rows()) {
    std::fill_n(outputs[1].as<float>(), outputs[1].size(), 0.f);
    if (bias_grad) std::fill_n(bias_grad, outputs[2].size(), 0.f);
    return;
  }
  multiply_rounded(grad, weight_of(weight), as_matrix(outputs[0], weight.dim(1)));
  add_up(grad, rows, outputs[1].as<float>(), bias_grad);
}

struct Settings {
  explicit Settings(const Attributes& attributes)
      : units(static_cast<uint32_t>(attributes.number("num_hidden"))),
        is_biased(!attributes.flag("no_bias", false)),
        flattens(attributes.flag("flatten", true)) {}
  uint32_t units;
  bool is_biased, flattens;
};

void types(const Attributes&, Types& inputs, Types& outputs) {
  outputs[0] = inputs[0] = data_type(inputs[0], "data");
  expect_type(inputs[1], kFloat32, "weight");
  if (inputs.size() > 2) expect_type(inputs[2], kFloat32, "bias");
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  functions();  // for errors at the call, not when it is run
  const Settings s(attributes);
  const Shape& data = inputs[0];
  expect_known(data, "data");
  if (data.size() < 2) fail("expected two dimensions or more, received data of shape ", describe(data));
  const uint32_t width =
      s.flattens ? std::accumulate(data.begin() + 1, data.end(), 1u, std::multiplies<uint32_t>()) : data.back();
  expect_shape(inputs[1], {s.units, width}, "weight");
  if (s.is_biased) expect_shape(inputs[2], {s.units}, "bias");
  outputs[0] = s.flattens ? Shape{data[0], s.units} : data;
  outputs[0].back() = s.units;
}

Arity arity(const Attributes& attributes) { return {Settings(attributes).is_biased ? 3 : 2, 1}; }

}  // namespace

const Operator dense{"_gluon_amp_dense", arity, types, shapes, forward, backward};

}  // namespace gluon_amp
