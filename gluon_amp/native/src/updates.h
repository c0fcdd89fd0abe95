// What updates of many weights in one call have in common. Inputs are, for every weight: the weight, its gradient, its
// states. Weights and states are float32 and are written in place, gradients may be bfloat16. Attributes: num_weights,
// lrs and wds with one value a weight, and those in Weights. AdamW multiplies by eta too: one for all, or etas.
#pragma once

#include <algorithm>

#include "operator.h"
#include "vector.h"

namespace gluon_amp {

constexpr int64_t kRange = 16384;

constexpr float kNoClip = __builtin_inff();  // so that loops need no branch

struct Rates {
  float lr, wd, rescale, clip, momentum, beta1, beta2, epsilon, eta;
};

// The rates of every weight of a call.
inline std::vector<Rates> rates_of_weights(const Attributes& attributes, size_t count, double epsilon = 1e-8) {
  const std::vector<double> lrs = attributes.numbers("lrs"), wds = attributes.numbers("wds");
  if (lrs.size() != count || wds.size() != count)
    fail("expected as many lrs and wds as weights, received ", lrs.size(), " lrs and ", wds.size(), " wds for ", count,
         " weights");
  const auto rate = [&](const char* name, double otherwise) {
    return static_cast<float>(attributes.number(name, otherwise));
  };
  const float limit = rate("clip_gradient", -1);
  const Rates shared{0,
                     0,
                     rate("rescale_grad", 1),
                     limit < 0 ? kNoClip : limit,
                     rate("momentum", 0),
                     rate("beta1", 0.9),
                     rate("beta2", 0.999),
                     rate("epsilon", epsilon),
                     1};
  std::vector<Rates> result(count, shared);
  const bool has_etas = !attributes.text("etas", "").empty();
  const std::vector<double> etas = has_etas ? attributes.numbers("etas") : std::vector<double>(count, rate("eta", 1));
  if (etas.size() != count) fail("expected as many etas as weights, received ", etas.size(), " for ", count);
  for (size_t i = 0; i < count; ++i) {
    result[i].lr = static_cast<float>(lrs[i]);
    result[i].wd = static_cast<float>(wds[i]);
    result[i].eta = static_cast<float>(etas[i]);
  }
  return result;
}

INLINED float clipped(float grad, float limit) { return grad > limit ? limit : grad < -limit ? -limit : grad; }

// A piece of a weight that one thread updates.
struct Range {
  size_t index;
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// The weights of a call. kInputs arrays belong to each.
template <int kStates>
class Weights {
 public:
  static constexpr int kInputs = 2 + kStates;

  explicit Weights(const Tensors& inputs) : inputs_(inputs) {
    for (size_t i = 0; i < inputs.size(); ++i) check(i);
    for (size_t i = 0; i < size(); ++i)
      for (int64_t begin = 0; begin < weight(i).size(); begin += kRange)
        ranges_.push_back({i, begin, std::min(begin + kRange, weight(i).size())});
  }

  // Pointers to the first element of a piece of a weight and of what belongs to it; null for states that do not exist.
  float* values(const Range& range) const { return floats(weight(range.index)) + range.begin; }
  float* state(const Range& range, int which) const {
    return which < kStates ? floats(input(range.index, 2 + which)) + range.begin : nullptr;
  }
  // Call a function with a pointer to the piece's gradients, of the type that they have.
  template <class Function>
  void with_grad(const Range& range, const Function& run) const {
    const Tensor& grad = input(range.index, 1);
    if (grad.type == kBfloat16)
      run(grad.as<const bfloat16>() + range.begin);
    else
      run(grad.as<const float>() + range.begin);
  }
  size_t size() const { return inputs_.size() / kInputs; }

  // Run a function for every piece of every weight, on all threads.
  template <class Function>
  void for_each(const Function& run) const {
    parallel_ranges(static_cast<int64_t>(ranges_.size()), 1, [&](int64_t i, int64_t) { run(ranges_[i], i); });
  }
  const std::vector<Range>& ranges() const { return ranges_; }

 private:
  const Tensor& weight(size_t index) const { return input(index, 0); }
  const Tensor& input(size_t index, int which) const { return inputs_[index * kInputs + which]; }
  static float* floats(const Tensor& tensor) { return tensor.as<float>(); }

  // MXNet hands out a copy of an array that oneDNN has put into a layout of its own, and would drop what is written.
  void check(size_t index) const {
    if (index % kInputs != 1 && !inputs_[index].version && inputs_[index].size())
      fail("input ", index, " cannot be written: oneDNN has put it into a layout of its own, or it has no values yet");
  }

  const Tensors& inputs_;
  std::vector<Range> ranges_;
};

template <int kStates>
Arity update_arity(const Attributes& attributes) {
  return {attributes.count("num_weights") * (2 + kStates), 0};
}

template <int kStates>
void update_types(const Attributes&, Types& inputs, Types&) {
  for (size_t i = 0; i < inputs.size(); ++i)
    if (i % (2 + kStates) == 1)
      inputs[i] = data_type(inputs[i], "a gradient");
    else
      expect_type(inputs[i], kFloat32, "a weight or a state");
}

template <int kStates>
void update_shapes(const Attributes& attributes, Shapes& inputs, Shapes&) {
  rates_of_weights(attributes, inputs.size() / (2 + kStates));  // for errors at the call, not when it is run
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Shape& weight = inputs[i / (2 + kStates) * (2 + kStates)];
    expect_known(weight, "a weight");
    expect_shape(inputs[i], Shape(weight), "a gradient or a state");
  }
}

template <int kStates>
std::vector<int> update_mutated(const Attributes& attributes) {
  std::vector<int> result;
  for (int i = 0; i < update_arity<kStates>(attributes).inputs; ++i)
    if (i % (2 + kStates) != 1) result.push_back(i);
  return result;
}

template <int kStates>
Operator made_update(const char* name, Operator::Compute forward,
                     decltype(Operator::shapes) shapes = update_shapes<kStates>) {
  return {name, update_arity<kStates>, update_types<kStates>, shapes, forward, nullptr, update_mutated<kStates>};
}

}  // namespace gluon_amp
