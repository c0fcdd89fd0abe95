// Operators that compute each value of the result from one of the data, in the type of the data.
//
// Such an operator has settings, a structure made of the attributes, which throws where one is wrong, with kRange, how
// many values a thread takes at once. For each type it has forward_kernel(data, out, count, settings) and
// backward_kernel(out_grad, data, data_grad, count, settings).
#pragma once

#include "operator.h"
#include "vector.h"

namespace gluon_amp {

template <class Settings>
struct Pointwise {
  template <class T>
  static void forward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
    const Settings settings(attributes);
    parallel_ranges(inputs[0].size(), Settings::kRange, [&](int64_t begin, int64_t end) {
      forward_kernel(inputs[0].as<const T>() + begin, outputs[0].as<T>() + begin, end - begin, settings);
    });
  }

  template <class T>
  static void backward_as(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
    const Settings settings(attributes);
    parallel_ranges(inputs[1].size(), Settings::kRange, [&](int64_t begin, int64_t end) {
      backward_kernel(inputs[0].as<const T>() + begin, inputs[1].as<const T>() + begin, outputs[0].as<T>() + begin,
                      end - begin, settings);
    });
  }

  static void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
    (inputs[0].type == kBfloat16 ? forward_as<bfloat16> : forward_as<float>)(attributes, inputs, outputs);
  }

  static void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
    (inputs[1].type == kBfloat16 ? backward_as<bfloat16> : backward_as<float>)(attributes, inputs, outputs);
  }

  static void types(const Attributes&, Types& inputs, Types& outputs) {
    outputs[0] = inputs[0] = data_type(inputs[0], "data");
  }

  static void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
    Settings{attributes};  // for errors at the call, not when it is run
    expect_known(inputs[0], "data");
    outputs[0] = inputs[0];
  }

  static Arity arity(const Attributes&) { return {1, 1}; }

  static constexpr Operator named(const char* name) { return {name, arity, types, shapes, forward, backward}; }
};

}  // namespace gluon_amp
