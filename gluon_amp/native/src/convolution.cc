// Convolutions of images with the channels last, as MXNet's Convolution computes them with the channels first. Weight
// and bias are float32, and their gradients. The weight stays as it is there; oneDNN gets it at every call in the order
// that it likes, rounded to the type of the data, which the output has, too.
#include <algorithm>

#include "onednn.h"

namespace gluon_amp {

namespace {

using namespace onednn;

struct Settings {
  explicit Settings(const Attributes& attributes)
      : kernel(attributes.pair("kernel", {})),
        stride(attributes.pair("stride", {1, 1})),
        dilate(attributes.pair("dilate", {1, 1})),
        pad(attributes.pair("pad", {0, 0})),
        filters(attributes.integer("num_filter", 0)),
        groups(attributes.integer("num_group", 1)),
        is_biased(!attributes.flag("no_bias", false)) {
    for (int64_t& each : dilate) --each;  // oneDNN counts the gaps
  }

  Dims kernel, stride, dilate, pad;
  int64_t filters, groups;
  bool is_biased;
};

// A map in oneDNN's order of dimensions, which lies with the channels last.
Desc map_desc(const Tensor& map) {
  const int64_t *d = map.shape, height = d[1], width = d[2], channels = d[3];
  return {{d[0], channels, height, width},
          data_type_of(map.type),
          {height * width * channels, 1, width * channels, channels}};
}

Dims weight_dims(const Settings& s, const Tensor& weight) {
  Dims dims(weight.shape, weight.shape + 4);
  if (s.groups == 1) return dims;
  dims[0] /= s.groups;
  dims.insert(dims.begin(), s.groups);
  return dims;
}

// What a convolution is made of: the same for its gradients.
struct Problem {
  Problem(const Attributes& attributes, const Tensor& data, const Tensor& weight, const Tensor& out)
      : s(attributes),
        src(map_desc(data)),
        dst(map_desc(out)),
        weights(weight_dims(s, weight), kF32),
        any_weights(Desc::any(weight_dims(s, weight), data_type_of(data.type))),
        any_weight_grads(Desc::any(weight_dims(s, weight), kF32)),
        bias({s.filters}, kF32),
        key{0, data.type, s.groups, s.is_biased} {
    for (const Tensor* each : {&data, &weight}) key.insert(key.end(), each->shape, each->shape + 4);
    for (const Dims* each : {&s.stride, &s.dilate, &s.pad}) key.insert(key.end(), each->begin(), each->end());
    for (int i = 0; i < 2; ++i)
      end_pad.push_back((out.dim(i + 1) - 1) * s.stride[i] + (s.kernel[i] - 1) * (s.dilate[i] + 1) + 1 -
                        data.dim(i + 1) - s.pad[i]);
  }

  // Whether it multiplies the pixels by a matrix that is so large that oneDNN's gradient of it takes longer than that
  // of a dense layer: the order that the weight has there is none of its own, which took up to 8.5 ms to put right.
  bool is_dense(const Tensor& weight) const {
    constexpr int64_t kLarge = 1 << 15;
    const Dims ones{1, 1}, zeros{0, 0};
    return key[1] == kFloat32 && s.groups == 1 && s.kernel == ones && s.stride == ones && s.pad == zeros &&
           weight.size() >= kLarge;
  }

  Dims key_of(char kind) const {
    Dims result = key;
    result[0] = kind;
    return result;
  }

  Settings s;
  Desc src, dst, weights, any_weights, any_weight_grads, bias;
  Dims key, end_pad;  // the padding behind a map: what the output's size says
};

Primitive forward_of(const Problem& p, bool is_biased) {
  return Primitive("a convolution", [&](PrimitiveDesc** desc, const Attr* attr) {
    return functions().convolution_forward_primitive_desc_create(
        desc, engine(), kForwardTraining, kDirect, p.src, p.any_weights, is_biased ? static_cast<Md>(p.bias) : nullptr,
        p.dst, p.s.stride.data(), p.s.dilate.data(), p.s.pad.data(), p.end_pad.data(), attr);
  });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &data = inputs[0], &weight = inputs[1], &out = outputs[0];
  if (!out.size()) return;
  const Problem p(attributes, data, weight, out);
  const auto primitive = cached<Primitive>(p.key_of('c'), [&] { return forward_of(p, p.s.is_biased); });
  const Md wanted = primitive->query(kWeights);
  primitive->run({{kSrc, p.src, data.data},
                  {kWeightsLayer, wanted, reordered(p.key_of('w'), p.weights, weight.data, wanted)},
                  {kBias, p.bias, p.s.is_biased ? inputs[2].data : nullptr},
                  {kDst, p.dst, out.data}});
}

void find_data_grad(const Problem& p, const Tensor& out_grad, const Tensor& weight, const Tensor& data_grad) {
  const auto primitive = cached<Primitive>(p.key_of('d'), [&] {
    const Primitive hint = forward_of(p, false);
    const auto make = [&](PrimitiveDesc** desc, const Attr* attr) {
      return functions().convolution_backward_data_primitive_desc_create(
          desc, engine(), kDirect, p.src, p.any_weights, p.dst, p.s.stride.data(), p.s.dilate.data(), p.s.pad.data(),
          p.end_pad.data(), hint.desc(), attr);
    };
    // With a stride oneDNN 3.2 puts matrix products first in bfloat16, which take ten times as long.
    const char* preferred = p.s.groups == data_grad.dim(-1) ? "jit_dw" : "";
    return Primitive("the gradient of a convolution's data", make, 1, false, preferred);
  });
  const Md wanted = primitive->query(kWeights);
  primitive->run({{kDiffDst, p.dst, out_grad.data},
                  {kWeightsLayer, wanted, reordered(p.key_of('v'), p.weights, weight.data, wanted)},
                  {kDiffSrc, p.src, data_grad.data}});
}

void find_weight_grad(const Problem& p, const Tensor& out_grad, const Tensor& data, const Tensor& weight_grad,
                      const Tensor* bias_grad) {
  const auto primitive = cached<Primitive>(p.key_of('g'), [&] {
    const Primitive hint = forward_of(p, bias_grad != nullptr);
    return Primitive("the gradient of a convolution's weight", [&](PrimitiveDesc** desc, const Attr* attr) {
      return functions().convolution_backward_weights_primitive_desc_create(
          desc, engine(), kDirect, p.src, p.any_weight_grads, bias_grad ? static_cast<Md>(p.bias) : nullptr, p.dst,
          p.s.stride.data(), p.s.dilate.data(), p.s.pad.data(), p.end_pad.data(), hint.desc(), attr);
    });
  });
  const Md given = primitive->query(kDiffWeights);
  void* grad = scratch<Problem>(bytes(given));
  primitive->run({{kSrc, p.src, data.data},
                  {kDiffDst, p.dst, out_grad.data},
                  {kDiffWeightsLayer, given, grad},
                  {kDiffBias, p.bias, bias_grad ? bias_grad->data : nullptr}});
  reordered(p.key_of('u'), given, grad, p.weights, weight_grad.data);
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  const Tensor &out_grad = inputs[0], &data = inputs[1], &weight = inputs[2];
  const Tensor* bias_grad = outputs.size() > 2 ? &outputs[2] : nullptr;
  if (!out_grad.size() || !data.size()) return clear(outputs, 1);
  const Problem p(attributes, data, weight, out_grad);
  find_data_grad(p, out_grad, weight, outputs[0]);
  if (p.is_dense(weight))
    add_up(as_matrix(out_grad, weight.dim(0)), as_matrix(data, weight.dim(1)), outputs[1].as<float>(),
           bias_grad ? bias_grad->as<float>() : nullptr);
  else
    find_weight_grad(p, out_grad, data, outputs[1], bias_grad);
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  functions();  // for errors at the call, not when it is run
  const Settings s(attributes);
  const Shape& data = inputs[0];
  expect_known(data, "data");
  if (data.size() != 4) fail("expected images, received data of shape ", describe(data));
  if (s.groups < 1 || data[3] % s.groups || s.filters % s.groups)
    fail("expected groups of equal size, received num_group=", s.groups, " for ", data[3], " channels");
  outputs[0] = {data[0], 0, 0, static_cast<uint32_t>(s.filters)};
  for (int i = 0; i < 2; ++i) {
    const int64_t room = data[i + 1] + 2 * s.pad[i] - (s.kernel[i] - 1) * (s.dilate[i] + 1) - 1;
    if (room < 0) fail("expected a map as large as the kernel, received data of shape ", describe(data));
    outputs[0][i + 1] = static_cast<uint32_t>(room / s.stride[i] + 1);
  }
  expect_shape(inputs[1],
               {static_cast<uint32_t>(s.filters), static_cast<uint32_t>(data[3] / s.groups),
                static_cast<uint32_t>(s.kernel[0]), static_cast<uint32_t>(s.kernel[1])},
               "weight");
  if (s.is_biased) expect_shape(inputs[2], {static_cast<uint32_t>(s.filters)}, "bias");
}

Arity arity(const Attributes& attributes) { return {Settings(attributes).is_biased ? 3 : 2, 1}; }

}  // namespace

const Operator convolution{"_gluon_amp_convolution", arity, layer_types, shapes, forward, backward};

}  // namespace gluon_amp
