// What updates of many weights in one call have in common. Inputs are, for every weight: the weight, its gradient, its
// states. Weights and states are float32 and are written in place, gradients may be bfloat16. Attributes: num_weights,
// lrs and wds with one value a weight, and those in Weights.
#pragma once

#include <algorithm>

#include "operator.h"
#include "vector.h"

namespace gluon_amp {

constexpr int64_t kRange = 16384;

// What is the same for all weights of a call, and what is not.
struct Rates {
  float lr, wd, rescale, clip, momentum, beta1, beta2, epsilon, eta;
};

INLINED float clipped(float grad, float limit) {
  if (limit < 0) return grad;
  return grad > limit ? limit : grad < -limit ? -limit : grad;
}

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

  Weights(const Attributes& attributes, const Tensors& inputs, double epsilon = 1e-8)
      : inputs_(inputs), lrs_(attributes.numbers("lrs")), wds_(attributes.numbers("wds")) {
    const size_t count = inputs.size() / kInputs;
    if (lrs_.size() != count || wds_.size() != count)
      fail("expected as many lrs and wds as weights, received ", lrs_.size(), " lrs and ", wds_.size(), " wds for ",
           count, " weights");
    for (size_t i = 0; i < inputs.size(); ++i) check(i);
    for (size_t i = 0; i < count; ++i)
      for (int64_t begin = 0; begin < weight(i).size(); begin += kRange)
        ranges_.push_back({i, begin, std::min(begin + kRange, weight(i).size())});
    shared_ = {0,
               0,
               rate(attributes, "rescale_grad", 1),
               rate(attributes, "clip_gradient", -1),
               rate(attributes, "momentum", 0),
               rate(attributes, "beta1", 0.9),
               rate(attributes, "beta2", 0.999),
               rate(attributes, "epsilon", epsilon),
               rate(attributes, "eta", 1)};
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
  size_t size() const { return lrs_.size(); }

  Rates rates(size_t index) const {
    Rates rates = shared_;
    rates.lr = static_cast<float>(lrs_[index]);
    rates.wd = static_cast<float>(wds_[index]);
    return rates;
  }

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

  static float rate(const Attributes& attributes, const char* name, double otherwise) {
    return static_cast<float>(attributes.number(name, otherwise));
  }

  // MXNet hands out a copy of an array that oneDNN has put into a layout of its own, and would drop what is written.
  void check(size_t index) const {
    if (index % kInputs != 1 && !inputs_[index].version && inputs_[index].size())
      fail("input ", index, " cannot be written: oneDNN has put it into a layout of its own, or it has no values yet");
  }

  const Tensors& inputs_;
  std::vector<double> lrs_, wds_;
  std::vector<Range> ranges_;
  Rates shared_;
};

template <int kStates>
Arity update_arity(const Attributes& attributes) {
  const int count = attributes.integer("num_weights", 1);
  if (count < 1) fail("expected a positive number, received num_weights=", count);
  return {count * (2 + kStates), 0};
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
void update_shapes(const Attributes&, Shapes& inputs, Shapes&) {
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
Operator made_update(const char* name, Operator::Compute forward) {
  return {name,    update_arity<kStates>,  update_types<kStates>, update_shapes<kStates>, forward,
          nullptr, update_mutated<kStates>};
}

}  // namespace gluon_amp
